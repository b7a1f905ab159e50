"""Class 19, crashes: two lengths do not fit; where does each of them come from?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in
from gradient_doctor.detectors.targets import explain_crash
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, OpCall, Session
from gradient_doctor.sites import is_user_code

_SIZES = (
    re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)"),
    re.compile(r"Expected input batch_size \((\d+)\) to match target batch_size \((\d+)\)"),
    re.compile(r"shape of the mask \[([\d, ]+)\] at index \d+ does not match .*?\[([\d, ]+)\]"),
    re.compile(r"expected index \[([\d, ]+)\] to be (?:no larger|smaller) than self \[([\d, ]+)\]"),
    re.compile(r"shape mismatch: .*?\[([\d, ]+)\].*?\[([\d, ]+)\]"),
    re.compile(r"expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\)"),
)
_SLICES = {"__getitem__", "narrow", "chunk", "split", "unbind", "index_select", "tensor_split"}
_MATRIX = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "__matmul__"}


@dataclass(frozen=True)
class Length:
    """How an axis got its size."""

    size: int
    how: str
    site: Site | None


class Lengths(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._axes = WeakIdKeyDictionary()  # tensor -> how each axis got its size
        self._seen: dict[int, Length] = {}
        self._told: set[int] = set()

    def op(self, call: OpCall) -> None:
        for output in call.outputs[:4]:
            if 0 < output.dim() <= 4:
                self._axes[output] = self._origins(call, output)

    def step_ended(self, record: object) -> None:
        self._seen.clear()

    def _origins(self, call: OpCall, output: Tensor) -> tuple[Length, ...]:
        axes = [(t, self._axes.get(t)) for t in call.inputs if t.dim()]
        lengths = []
        for axis, size in enumerate(output.shape):
            length = None
            if call.short in ("cat", "concat", "concatenate", "hstack"):
                length = self._joined(call, axis, output)
            for _, origins in axes:
                if length is None and origins is not None:
                    length = _inherited(origins, axis, size)
            length = length or self._made(call, axes, axis, size)
            lengths.append(length)
            self._seen.setdefault(size, length)
        return tuple(lengths)

    def _joined(self, call: OpCall, axis: int, output: Tensor) -> Length | None:
        parts = [t for t in call.inputs if t.dim() == output.dim()]
        sizes = [t.shape[axis] for t in parts]
        if len(sizes) < 2 or sum(sizes) != output.shape[axis]:
            return None
        return Length(output.shape[axis], " + ".join(map(str, sizes)), call.site)

    def _made(
        self,
        call: OpCall,
        axes: list[tuple[Tensor, tuple[Length, ...] | None]],
        axis: int,
        size: int,
    ) -> Length:
        for tensor, origins in axes:
            if call.short in _SLICES and axis < tensor.dim() and tensor.shape[axis] > size:
                before = tensor.shape[axis]
                same = origins is not None and axis < len(origins) and origins[axis].size == before
                inner = origins[axis].how if origins is not None and same else ""
                made_of = f"({inner})" if "+" in inner and "(" not in inner else str(before)
                return Length(size, f"{made_of} - {before - size}", call.site)
        return Length(size, f"{call.short}", call.site)

    # crashes

    def op_failed(self, call: OpCall, error: BaseException) -> None:
        sizes = _sizes(str(error))
        if sizes is None or call.short in _MATRIX:
            return
        self._told.add(id(error))
        if explain_crash(call) is not None:
            return  # not a length, but what the target is
        left, right = sizes
        lengths = [self._length_of(call, size) for size in sizes]
        described = [_told(n, length) for n, length in zip(sizes, lengths)]
        guess = "" if any(length and "+" in length.how for length in lengths) else self._sum(*sizes)
        self.report(
            19,
            Severity.ERROR,
            f"{call.short} got lengths {left} and {right} for the same axis.",
            why=f"{described[0]}; {described[1]}.{guess}",
            fix="Cut both to the same positions before they meet: for answers of length T in "
            "sequences of prompt and answer, logits[:, -T-1:-1] predict tokens[:, -T:].",
            site=call.site,
            parameters=live_in(self.session, call.inputs),
            related=tuple(length.site for length in lengths if length is not None),
        )

    def _length_of(self, call: OpCall, size: int) -> Length | None:
        tensors = [t for t in call.inputs if size in t.shape]
        if call.short == "__getitem__":
            picked = argument(call, 1, "index")
            tensors += [t for t in (picked,) if isinstance(t, Tensor) and size in t.shape]
        for tensor in tensors:
            origins = self._axes.get(tensor)
            if origins is not None:
                return _inherited(origins, list(tensor.shape).index(size), size)
        return None

    def _sum(self, left: int, right: int) -> str:
        """372 = 173 + 200 - 1: the longer one as a sum of the shorter and another known length."""
        long, short = max(left, right), min(left, right)
        for extra, sign in ((0, ""), (1, " - 1"), (-1, " + 1")):
            other = long - short + extra
            if other > 1 and other in self._seen:
                return f" Note that {long} = {other} + {short}{sign}."
        return ""

    def finish(self, error: BaseException | None) -> None:
        """A crash in a step that was not traced: the message and the line are all there is."""
        sizes = _sizes(str(error)) if isinstance(error, (RuntimeError, IndexError)) else None
        if sizes is None or error is None or id(error) in self._told:
            return
        site = next(_user_lines(error), None)
        self.report(
            19,
            Severity.ERROR,
            f"Lengths {sizes[0]} and {sizes[1]} meet on the same axis.",
            why=f"{str(error).splitlines()[0]} (this step was not traced: run with mode='trace' "
            "for the lines where both lengths come from).",
            fix="Cut both to the same positions before they meet.",
            site=site,
        )


def _inherited(origins: tuple[Length, ...], axis: int, size: int) -> Length | None:
    """From the axes as they were noted: `resize_` and `t_` change a tensor that is known."""
    if axis < len(origins) and origins[axis].size == size:
        return origins[axis]
    return next((length for length in origins if length.size == size > 1), None)


def _told(size: int, length: Length | None) -> str:
    if length is None:
        return f"{size} comes from data"
    at = f" at {length.site}" if length.site is not None else ""
    how = length.how if any(sign in length.how for sign in "+-") else f"made by {length.how}"
    return f"{size} = {how}{at}" if "made" not in how else f"{size} was {how}{at}"


def _sizes(message: str) -> tuple[int, int] | None:
    for pattern in _SIZES:
        match = pattern.search(message)
        if match is None:
            continue
        shapes = [[int(n) for n in re.findall(r"\d+", part)] for part in match.groups()]
        for a, b in zip(*shapes):
            if a != b:
                return a, b
    return None


def _user_lines(error: BaseException) -> Iterator[Site]:
    """Lines of the user's code in a traceback, the innermost first."""
    lines = []
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_user_code(code):
            lines.append(Site(code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return reversed(lines)
