"""A traced call is made from the user's line, so that torch's warnings name that line.

torch's warnings name the line of the frame that called it: the doctor's, if the doctor hands the
call on. Worse, Python shows a warning once for each line, and then all calls are one line. So the
call is made by a function whose file, line and module are those of the caller.
"""

from __future__ import annotations

import functools
import sys
from types import CodeType, FrameType, FunctionType
from typing import Any

_OVERRIDES = "overrides.py"

# one line: its instructions have the line of its beginning. The name of its first argument is the
# mark by which `sites` tells it from the user's own code.
_CALL = (lambda _gradient_doctor, args, kwargs: _gradient_doctor(*args, **kwargs)).__code__
MARK = _CALL.co_varnames[0]


def is_stand_in(code: CodeType) -> bool:
    """Whether a frame of this code is the doctor's, under the name of a user's file."""
    return MARK in code.co_varnames


def call_from_caller(func: Any, args: Any, kwargs: dict[str, Any], depth: int = 1) -> Any:
    """`func(*args, **kwargs)` as if from the frame that called torch.

    `depth` is how many frames above this one torch's `__torch_function__` was entered.
    """
    frame = calling_for(sys._getframe(depth + 1))
    if frame is None:
        return func(*args, **kwargs)
    return stand_in(frame)(func, args, kwargs)


def calling_for(frame: FrameType) -> FrameType | None:
    """The frame that called torch, from the one that entered `__torch_function__`."""
    if frame.f_code.co_filename.endswith(_OVERRIDES):
        # a function of Python that has asked `handle_torch_function`: its own caller
        first = frame.f_back
        return None if first is None else first.f_back
    return frame


def stand_in(frame: FrameType) -> FunctionType:
    """A function that makes a call as if on the running line of a frame."""
    code = _code(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    return FunctionType(code, frame.f_globals)


@functools.lru_cache(maxsize=4096)
def _code(filename: str, line: int, name: str) -> CodeType:
    return _CALL.replace(co_filename=filename, co_firstlineno=line, co_name=name, co_qualname=name)
