"""A program as the interpreter would run it: `python script.py ...` or `python -m package ...`.

`runpy` comes close, but names a script as it was typed, where the interpreter names it absolutely,
and knows nothing of the first entry of `sys.path`, which under `python -m` is ours.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType

_MAINS = ("__main__", "__mp_main__")


class ProgramError(ValueError):
    """There is no such program; nothing was run."""


@dataclass(frozen=True)
class Program:
    """What to run: a file, or the name of a module as for `python -m`."""

    name: str
    is_module: bool = False

    def __post_init__(self) -> None:
        if not self.is_module and not os.path.isfile(self.name):
            kind = "a folder" if os.path.isdir(self.name) else "not there"
            raise ProgramError(
                f"no script at {self.name!r} ({kind}): give the path of a Python file, or "
                "-m and the name of a module"
            )

    @property
    def folder(self) -> str:
        """What the interpreter puts first on `sys.path`."""
        if self.is_module:
            return os.getcwd()
        return os.path.dirname(os.path.realpath(self.name))

    def load(self) -> tuple[CodeType, ModuleType, str]:
        """The code, an empty `__main__` for it, and `sys.argv[0]`."""
        main = ModuleType("__main__")
        if self.is_module:
            spec, code = _find(self.name)
            main.__spec__, main.__loader__ = spec, spec.loader
            main.__package__ = spec.parent
            main.__file__ = spec.origin
            return code, main, spec.origin or self.name
        path = os.path.abspath(self.name)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        main.__file__ = path
        main.__loader__ = SourceFileLoader("__main__", path)
        main.__dict__["__cached__"] = None
        return code, main, self.name


def _find(name: str) -> tuple[ModuleSpec, CodeType]:
    parent = name.rpartition(".")[0]
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as missing:
        ours = missing.name == name or (parent + ".").startswith(f"{missing.name}.")
        if not ours:
            raise  # an import inside the package: its own crash
        spec = None
    if spec is not None and spec.submodule_search_locations is not None:
        return _find(f"{name}.__main__")
    get_code = getattr(getattr(spec, "loader", None), "get_code", None)
    code = None if get_code is None else get_code(name)
    if spec is None or code is None:
        raise ProgramError(f"no module {name!r} to run: it must be importable from {os.getcwd()}")
    return spec, code


@contextlib.contextmanager
def as_main(program: Program, argv: Sequence[str], *, instead: bool = False) -> Iterator[None]:
    """`sys.argv` and `sys.path` as for this program; `instead` of our own first entry."""
    argv_before, path_before = sys.argv, list(sys.path)
    mains_before = {name: sys.modules.get(name) for name in _MAINS}
    sys.argv = [program.name, *argv]
    if not sys.flags.safe_path:
        if instead:
            del sys.path[:1]
        sys.path.insert(0, program.folder)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv_before, path_before
        for name, main in mains_before.items():
            if main is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = main


def run(program: Program) -> None:
    """Inside `as_main`: find the code, and execute it as `__main__`."""
    code, main, sys.argv[0] = program.load()
    # pickle looks for the program's classes here, also for those that come back from a process
    # that multiprocessing has spawned, which calls them by its own name
    sys.modules.update(dict.fromkeys(_MAINS, main))
    main.__dict__["__builtins__"] = __builtins__
    exec(code, main.__dict__)
