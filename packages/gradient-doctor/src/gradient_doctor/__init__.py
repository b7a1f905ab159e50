"""Where did the gradient stop? A doctor for any PyTorch training loop.

Needs torch and the standard library only. The public names below are imported when first used, so
that a command's help, or pytest finding the plugin, does not import torch. `__init__.pyi` says the
same to type checkers; a test compares the two.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_HOME: dict[str, str] = {
    "Doctor": "doctor",
    "Finding": "findings",
    "Severity": "findings",
    "Site": "findings",
    "ScoreTest": "score",
    "check_entropy": "conformance",
    "preflight": "preflight",
    "score_test": "score",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


class _Package(ModuleType):
    """`gradient_doctor.preflight` is the function, also after its module has been imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "preflight" and isinstance(value, ModuleType):
            value = value.preflight
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
