"""PyYAML chooses by exact type: its tables are told that a traced float is a float.

Its safe dumpers refuse a subclass of float, and the others write it as a Python object. yaml may be
imported long after the first traced float, so a finder waits for it. Tables are copied by classes
that add to them: those made later copy our entry too, those made before are gone through.

Nothing is taken back when the examination ends: numbers that were read in it live on in the user's
program, and must be written then too.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from gradient_doctor.taint import TracedFloat

_YAML = "yaml"


class _Waiting(MetaPathFinder):
    """Finds nothing by itself; goes away once yaml is imported."""

    def __init__(self) -> None:
        self._looking = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != _YAML or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking = False
        loader: Any = None if spec is None else spec.loader
        if not hasattr(loader, "exec_module"):
            return spec
        run = loader.exec_module

        def exec_module(module: Any) -> None:
            loader.exec_module = run
            run(module)
            _register(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = exec_module
        return spec


_waiting = _Waiting()
_told: Any = None  # the module whose tables know it


def teach_yaml() -> None:
    """Called for each traced float, so it must be cheap: nothing to do but the first time."""
    global _told
    yaml = sys.modules.get(_YAML)
    if yaml is None:
        if _waiting not in sys.meta_path:
            sys.meta_path.insert(0, _waiting)
    elif yaml is not _told:
        _register(yaml)
        _told = yaml


def _register(yaml: Any) -> None:
    # a module of the user's own may have that name
    safe = getattr(getattr(yaml, "representer", None), "SafeRepresenter", None)
    waiting = [safe] if isinstance(safe, type) else []
    while waiting:
        kind: Any = waiting.pop()
        waiting.extend(kind.__subclasses__())
        table = kind.__dict__.get("yaml_representers")
        if table is not None:
            table.setdefault(TracedFloat, _represent)


def _represent(dumper: Any, number: TracedFloat) -> Any:
    # as it writes floats now: the user may have given it another way since
    return dumper.yaml_representers[float](dumper, float.__pos__(number))
