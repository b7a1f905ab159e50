"""What torch was asked to do, where a program has put a wrapper of its own in torch's place.

A mode is handed the function by its public name, which torch looks up again (`F.cross_entropy`,
`torch.Tensor.backward`). If a program has replaced that name, to count, to scale or to log, the
mode is handed the wrapper, though it is the wrapper that has just called torch. Were it called
again, its own work would be done twice. So we go on with the function that is asking.
"""

from __future__ import annotations

import sys
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.overrides import handle_torch_function

from gradient_doctor.sites import is_torch_code

_HANDLES = getattr(handle_torch_function, "__wrapped__", handle_torch_function).__code__


class Replaced:
    """Asked for every call of a traced step; remembers whose the functions are."""

    def __init__(self) -> None:
        self._torchs: dict[Any, bool] = {}
        self._asking: dict[CodeType, Any] = {}
        self.names: dict[Any, str] = {}  # of the functions that were made here

    def original(self, func: Any) -> Any:
        """The function to call, seen from `__torch_function__`; nearly always `func` itself."""
        if type(func) is not FunctionType:
            return func
        torchs = self._torchs.get(func)
        if torchs is None:
            torchs = self._torchs[func] = is_torch_code(func.__code__)
        if torchs:
            return func
        frame = sys._getframe(2)
        if frame.f_code is not _HANDLES:
            return self._of_c(func)
        asking = frame.f_back
        return func if asking is None else self._of_python(func, asking.f_code, asking.f_globals)

    def _of_c(self, func: Any) -> Any:
        """A method of tensors that is written in C: the base class still has it."""
        own = vars(torch.Tensor)
        name = next((name for name, value in own.items() if value is func), "")
        return getattr(torch._C.TensorBase, name, func)

    def _of_python(self, func: Any, code: CodeType, space: dict[str, Any]) -> Any:
        name = code.co_name
        if vars(torch.Tensor).get(name) is func:
            public = f"torch.Tensor.{name}"
        elif space.get(name) is func:
            public = f"{space.get('__name__')}.{name}"
        else:
            return func  # not the wrapper of what is asking
        if code.co_freevars:
            return func
        if code not in self._asking:
            made = self._asking[code] = FunctionType(code, space)
            self._torchs[made] = True
            self.names[made] = public
        return self._asking[code]
