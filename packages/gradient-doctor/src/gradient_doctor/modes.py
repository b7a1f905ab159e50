"""Our place on torch's stack of function modes, among modes of the user's.

`with mode:` of the user's ends by popping whatever is on top. So a mode that comes and goes between
two lines of a loop must never be pushed above one that the user entered later: it goes back to the
place where it was first put. Only the default device insists on the bottom, whenever it is set.
"""

from __future__ import annotations

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)


def depth() -> int:
    """How many modes are active, the default device aside."""
    stack = _get_current_function_mode_stack()
    return len(stack) - _has_default_device(stack)


def is_active(mode: TorchFunctionMode) -> bool:
    return any(active is mode for active in _get_current_function_mode_stack())


def place(mode: TorchFunctionMode) -> int | None:
    """How many modes are below this one, the default device aside; None if it is not active."""
    stack = _get_current_function_mode_stack()
    for below, mode_below in enumerate(stack):
        if mode_below is mode:
            return below - _has_default_device(stack)
    return None


def insert(mode: TorchFunctionMode, at: int) -> None:
    """Put a mode above `at` others."""
    others = _get_current_function_mode_stack()
    place = min(at + _has_default_device(others), len(others))
    if place == len(others):
        _push_mode(mode)
        return
    _become([*others[:place], mode, *others[place:]])


def remove(mode: TorchFunctionMode) -> None:
    """Take a mode out, wherever it is."""
    stack = _get_current_function_mode_stack()
    if stack and stack[-1] is mode:
        _pop_mode()
    else:
        _become([active for active in stack if active is not mode])


def _has_default_device(stack: list[TorchFunctionMode]) -> bool:
    local = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
    default = getattr(local, "device_context", None)
    return default is not None and bool(stack) and stack[0] is default


def _become(stack: list[TorchFunctionMode]) -> None:
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in stack:
        _push_mode(mode)
