"""Numbers that leave torch and come back inside of a tensor that nobody sees made.

`torch.Tensor([a, b])`, `torch.FloatTensor(losses)`, `torch.from_numpy(np.array(values))` and
`torch.from_numpy(out.data.numpy()[hard])` pass by torch's overrides, or through numpy. The tensor
is known again by what it holds: the very numbers that left in this step, bit by bit. Round numbers
(0.5, 3, 1e-3) are no evidence: a program may have them for reasons of its own.
"""

from __future__ import annotations

import ast
import struct

import torch
from torch import Tensor

from gradient_doctor.taint import Taint

_MOST = 1024  # numbers of one tensor that are compared one by one
_ROUND = 5  # digits: what a person writes down has fewer
_LARGE = 1 << 20  # numbers of arrays that are kept, of one step
_SAMPLE = 64  # that are compared first: what is data differs at once
_ARRAYS = {"array", "asarray", "fromiter", "stack"}


def constructor_of(expression: ast.AST | None) -> str | None:
    """The name of what makes a tensor or an array of the numbers that it takes, in this call."""
    if not isinstance(expression, ast.Call):
        return None
    function = expression.func
    name = getattr(function, "attr", None) or getattr(function, "id", "")
    if name.endswith("Tensor"):
        return f"torch.{name}"
    return name if name in _ARRAYS else None


class Returned:
    """The numbers that left in this step, by their value in single precision."""

    def __init__(self) -> None:
        self._left: dict[bytes, Taint] = {}
        self._arrays: list[tuple[Tensor, Taint]] = []
        self._size = 0

    def __bool__(self) -> bool:
        return bool(self._left or self._arrays)

    def clear(self) -> None:
        self._left.clear()
        self._arrays.clear()
        self._size = 0

    def keep(self, number: float, taint: Taint) -> None:
        if not is_round(number):
            self._left.setdefault(_single(number), taint)

    def keep_array(self, values: Tensor, taint: Taint) -> None:
        """A copy of what numpy gets: the array itself may be written to."""
        if self._size + values.numel() <= _LARGE:
            self._size += values.numel()
            self._arrays.append((_bits(values).clone(), taint))

    def inside(self, tensor: Tensor) -> list[Taint]:
        """The taints of the numbers that a tensor holds, if it holds no others but round ones."""
        taints = self._of_numbers(tensor) if self._left else []
        return taints or (self._of_arrays(tensor) if self._arrays else [])

    def _of_numbers(self, tensor: Tensor) -> list[Taint]:
        if not 0 < tensor.numel() <= min(_MOST, 4 * len(self._left)):
            return []
        taints: dict[int, Taint] = {}
        for number in tensor.detach().reshape(-1).tolist():
            taint = self._left.get(_single(number))
            if taint is not None:
                taints[id(taint)] = taint
            elif not is_round(number):
                return []
        return list(taints.values())

    def _of_arrays(self, tensor: Tensor) -> list[Taint]:
        if not 0 < tensor.numel() <= _LARGE:
            return []
        values = tensor.detach().reshape(-1).cpu().double()
        thousands = values * 1000
        telling = _bits(values[(thousands - thousands.round()).abs() > 1e-2])
        held = torch.cat([bits for bits, _ in self._arrays])
        needed = 1 if held.numel() < _MOST else 2  # of many numbers one is hit by chance
        if telling.numel() < needed or not bool(torch.isin(telling[:_SAMPLE], held).all()):
            return []
        if not bool(torch.isin(telling, held).all()):
            return []
        return [t for bits, t in self._arrays if bool(torch.isin(telling, bits).any())]


def is_round(number: float) -> bool:
    """Whether a person could have written it down."""
    digits = f"{number:.7g}".split("e")[0].replace(".", "").strip("-0")
    return len(digits) < _ROUND or number != number


def _bits(values: Tensor) -> Tensor:
    return values.detach().reshape(-1).cpu().float().view(torch.int32)


def _single(number: float) -> bytes:
    try:
        return struct.pack("f", number)
    except OverflowError:
        return struct.pack("d", number)
