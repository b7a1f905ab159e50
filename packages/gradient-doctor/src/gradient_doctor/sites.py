"""Which line of the user's code are we in? Frames of torch and of libraries are walked over."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from types import CodeType, FrameType

import torch
from torch import nn

from gradient_doctor.callers import is_stand_in
from gradient_doctor.findings import Site

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LIBRARY = tuple(
    os.path.join(path, "")
    for path in {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
)
HIDDEN = "__tracebackhide__"
"""A local variable of this name: pytest's mark of code that stands between a caller and a call."""
_CALLERS = 16  # frames from a module's constructor outwards
_PARTS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


@functools.cache
def _kind(filename: str) -> str:
    """`doctor`, `torch`, `library` or `user`."""
    if filename.startswith("<"):
        return "user" if filename.startswith(("<ipython", "<stdin")) else "library"
    path = os.path.abspath(filename)
    if path.startswith(_HERE):
        return "doctor"
    if path.startswith(_TORCH):
        return "torch"
    if path.startswith(_LIBRARY) or any(part in path for part in _PARTS):
        return "library"
    return "user"


def _frame_kind(frame: FrameType) -> str:
    """The same of a frame. A wrapper that hides itself from pytest's tracebacks is a library's.

    The mark is looked for in the code: `f_locals` would keep the frame's tensors alive.
    """
    code = frame.f_code
    known = _kinds.get(id(code))
    if known is None:
        known = _kinds[id(code)] = (code, _code_kind(code))
    return known[1]


# by id: to hash a code object takes longer than to ask all that is asked here
_kinds: dict[int, tuple[CodeType, str]] = {}


def _code_kind(code: CodeType) -> str:
    if HIDDEN in code.co_varnames:
        return "library"
    if is_stand_in(code):
        return "doctor"
    return _kind(code.co_filename)


def decorated(frame: FrameType) -> CodeType | None:
    """The function under `@torch.no_grad()`, seen from torch's wrapper around it."""
    if frame.f_code.co_name != "decorate_context":
        return None
    func = frame.f_locals.get("func")
    return getattr(func, "__code__", None)


def here(module: str = "") -> Site | None:
    """The innermost line outside torch, the doctor and installed libraries; else of a library.

    Inside torch's wrapper of a decorated function the line is the decorator's, not the caller's.
    """
    frame: FrameType | None = sys._getframe(1)
    fallback: Site | None = None
    while frame is not None:
        code = frame.f_code
        kind = _frame_kind(frame)
        if kind == "user":
            return Site(code.co_filename, frame.f_lineno, code.co_name, module)
        if kind == "torch":
            inner = decorated(frame)
            # we came through the wrapper's `with`, else the function itself had been met first:
            # its caller did not switch gradients off, its decorator did
            if inner is not None and _kind(inner.co_filename) == "user":
                return Site(inner.co_filename, inner.co_firstlineno, inner.co_name, module)
        elif kind == "library" and fallback is None:
            fallback = Site(code.co_filename, frame.f_lineno, code.co_name, module)
        frame = frame.f_back
    return fallback


def constructors() -> list[tuple[nn.Module, tuple[Site, ...]]]:
    """Modules whose `__init__` is running, the innermost first, with the lines of its callers."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    lines = [_line_of(f) for f in frames]
    running: dict[int, tuple[nn.Module, tuple[Site, ...]]] = {}
    for depth, frame in enumerate(frames):
        names = frame.f_code.co_varnames
        if frame.f_code.co_name != "__init__" or not names:
            continue
        owner = frame.f_locals.get(names[0])
        if isinstance(owner, nn.Module):
            # the outermost of its constructors is the one that was called: inner ones are super()'s
            callers = tuple(line for line in lines[depth + 1 :][:_CALLERS] if line is not None)
            running[id(owner)] = (owner, callers)
    return list(running.values())


def user_lines() -> tuple[Site, ...]:
    """The lines of the user's code that are running, the innermost first."""
    lines: list[Site] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < _CALLERS:
        line = _line_of(frame)
        lines += [] if line is None else [line]
        frame = frame.f_back
    return tuple(lines)


def running_lines() -> tuple[int, ...]:
    """A key of the user's lines that are running: cheap, for what is asked in every step."""
    way: list[int] = []
    frame: FrameType | None = sys._getframe(1)
    kinds = _kinds
    while frame is not None and len(way) < 4 * _CALLERS:
        code = frame.f_code
        known = kinds.get(id(code))
        if (_frame_kind(frame) if known is None else known[1]) == "user":
            way += (id(code), frame.f_lineno)
        frame = frame.f_back
    return tuple(way)


def _line_of(frame: FrameType) -> Site | None:
    if _frame_kind(frame) != "user":
        return None
    return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def within(part: str) -> bool:
    """Whether a frame of torch between here and the user's code lies in this part of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _frame_kind(frame) in ("torch", "doctor"):
        if part in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def asked_by_user(depth: int) -> bool:
    """Whether the frame that many calls above the asking one is outside torch and the doctor."""
    return _frame_kind(sys._getframe(depth + 1)) in ("user", "library")


def called_by_user() -> bool:
    """Whether the call that the doctor is looking at stands in the user's own code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _frame_kind(frame) == "doctor":
        frame = frame.f_back
    return frame is not None and _frame_kind(frame) == "user"


def called_by_torch() -> bool:
    """Whether the call that the doctor is looking at is torch's own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _frame_kind(frame) == "doctor":
        frame = frame.f_back
    return frame is not None and _frame_kind(frame) == "torch"


_WRAPPERS = ("_tensor.py", "overrides.py", "functional.py")


def calling_frame() -> FrameType | None:
    """The user's frame whose expression is the call that the doctor is looking at.

    None for calls of libraries and of torch's own modules, whose arguments are not the user's.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kind = _frame_kind(frame)
        if kind == "torch" and frame.f_code.co_filename.endswith(_WRAPPERS):
            kind = "doctor"
        if kind != "doctor":
            return frame if kind == "user" else None
        frame = frame.f_back
    return None


def user_frame() -> FrameType | None:
    """The innermost frame of the user's code, to look for names of variables in it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _frame_kind(frame) == "user":
            return frame
        frame = frame.f_back
    return None


def is_doctors_code(code: CodeType) -> bool:
    return is_stand_in(code) or _kind(code.co_filename) == "doctor"


def is_torch_code(code: CodeType) -> bool:
    return _kind(code.co_filename) == "torch"


def is_user_file(filename: str) -> bool:
    return _kind(filename) == "user"


def is_user_code(code: CodeType) -> bool:
    """As `is_user_file`, without the calls that the doctor makes in the name of such a file."""
    return _kind(code.co_filename) == "user" and not is_stand_in(code)
