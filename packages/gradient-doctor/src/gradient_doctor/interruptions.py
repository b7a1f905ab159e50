"""Exceptions of the program's that arrive while the doctor's own code is running.

A signal handler (a timeout, say) raises wherever the main thread happens to be, and so does a
thread that has another one raise. Such an error is not a mistake of the doctor's: it must reach the
program.
"""

from __future__ import annotations

import functools
import signal
import sys
from types import CodeType
from typing import Any

from gradient_doctor.sites import is_doctors_code, is_user_file


def is_the_programs(error: BaseException) -> bool:
    """Whether it was raised by a signal handler, or put into our code by another thread."""
    codes = _frames(error)
    if {*codes} & _handlers():
        return True
    module = type(error).__module__
    own = module in ("builtins", "__builtin__") or module.partition(".")[0] in (
        *("torch", "numpy", "gradient_doctor"),
    )
    # our own code raises nothing that a program has defined
    return not own and bool(codes) and is_doctors_code(codes[-1]) and _is_defined_by_user(error)


def _frames(error: BaseException) -> list[CodeType]:
    codes, traceback = [], error.__traceback__
    while traceback is not None:
        codes.append(traceback.tb_frame.f_code)
        traceback = traceback.tb_next
    return codes


def _handlers() -> set[CodeType]:
    """The code of Python functions that handle signals now."""
    codes = map(_code, map(signal.getsignal, signal.valid_signals()))
    return {code for code in codes if code is not None}


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    code = getattr(handler, "__code__", None)
    if code is None and callable(handler):  # an object with __call__
        code = getattr(type(handler).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _is_defined_by_user(error: BaseException) -> bool:
    module = sys.modules.get(type(error).__module__)
    file = getattr(module, "__file__", None)
    return file is None or is_user_file(file)
