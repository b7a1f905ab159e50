"""How a loss was put together: sums, constant factors, and the parts that are cut off.

A term remembers the linear steps between values: what was added to what, with which factor, and
where. It holds no tensors. All other operations end the chain: what they make is a term of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.findings import Site
from gradient_doctor.python_numbers import Number
from gradient_doctor.session import OpCall, Session
from gradient_doctor.taint import Taint

_ADD, _SUB, _MUL, _DIV = {"add"}, {"sub", "subtract"}, {"mul", "multiply"}, {"div", "divide"}
_DIV |= {"true_divide", "__truediv__"}
_RSUB, _RDIV = {"__rsub__", "rsub"}, {"__rtruediv__", "__rdiv__", "reciprocal"}
# the same numbers, rearranged or added up
LINEAR = {
    *("sum", "mean", "nansum", "nanmean", "float", "double", "to", "type_as", "squeeze", "view"),
    *("unsqueeze", "reshape", "flatten", "clone", "contiguous", "expand", "expand_as", "pos"),
    *("stack", "cat", "concat", "masked_fill", "where", "transpose", "permute", "__getitem__"),
}
_PATHS = 4096  # ways through one loss
COPIES = {"tensor", "as_tensor"}  # of a list of values: their numbers alone
CUTS = {"detach", "detach_", "data", "item", "__float__", "numpy", "tolist", "new_tensor"}


@dataclass(eq=False, slots=True)
class Term:
    """One value. `parts` with their factors; NaN is a factor that is a value of its own.

    `kind`: sum (parts), scale (parts[0] times `factor`), cut (parts[0], without its gradient),
    value (anything else).
    """

    kind: str
    op: str
    site: Site | None
    step: int
    taint: Taint | None
    scalar: bool
    data: bool  # computed from more than Python numbers
    amount: float | None = None  # the value, of scalars without gradient
    parts: tuple[tuple[Term, float], ...] = ()
    factor: Term | None = None
    ratio: bool = False  # a quotient of two values: a normaliser, not a weight
    used: bool = False  # an operation or a backward took it
    read: frozenset[Site | None] = frozenset()  # where it was only looked at: item, detach

    @property
    def live(self) -> int:
        return 0 if self.taint is None else self.taint.live

    @property
    def depends(self) -> int:
        return 0 if self.taint is None else self.taint.depends

    def inside(self) -> Iterator[Term]:
        """This term and all that it is made of, through cuts too."""
        stack: list[Term] = [self]
        seen: set[int] = set()
        while stack:
            term = stack.pop()
            if id(term) not in seen:
                seen.add(id(term))
                yield term
                stack.extend(part for part, _ in term.parts)
                if term.factor is not None:
                    stack.append(term.factor)


@dataclass(frozen=True)
class Path:
    """One way from a loss down to a term: its factor, and the sums on the way, the loss first."""

    term: Term
    factor: float
    steps: tuple[tuple[Term, float], ...]


class Terms:
    """The terms of the tensors of a traced step."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._known = WeakIdKeyDictionary()
        self.scalars: list[Term] = []  # of this step, with gradient
        self._addresses: dict[int | None, Term] = {}  # of this step: what was last written there

    def of(self, tensor: Tensor) -> Term:
        term = self._known.get(tensor)
        if term is None:
            many = tensor.numel() > 1
            taint = self.session.taint_of(tensor)
            step = self.session.step
            term = Term("value", "", None, step, taint, not many, many, _amount(tensor))
            self._known[tensor] = term
        elif term.step != self.session.step and term.parts:
            term.parts, term.factor = (), None  # histories end with their step
        return term

    def behind(self, leaf: Tensor) -> Term:
        """The term whose memory a leaf shares: `Variable(loss)` is a tensor that nobody sees made.

        A leaf that some call has made has a term of its own.
        """
        known = self._known.get(leaf)
        if (known is None or not known.op) and leaf.is_leaf and leaf.numel() == 1:
            address = _address(leaf)
            return self.of(leaf) if address is None else self._addresses.get(address, self.of(leaf))
        return self.of(leaf)

    def step_ended(self) -> None:
        self.scalars.clear()
        self._addresses.clear()

    def made(self, call: OpCall) -> Term | None:
        """The term of what this call made."""
        if call.short in CUTS:
            self._cut(call)
            return None
        if call.short in COPIES:
            for tensor in call.inputs:
                inner = self.of(tensor)
                inner.read = inner.read | {call.site}
        for tensor in call.inputs:
            stored = self._known.get(tensor)
            if stored is not None:
                stored.used = True
        if not call.outputs or not _counts(call.outputs[0]):
            return None
        output = call.outputs[0]
        term = self._build(call, output)
        self._known[output] = term
        if term.scalar and output.is_floating_point():
            self._addresses[_address(output)] = term
        if term.scalar and term.live:
            self.scalars.append(term)
        return term

    def _cut(self, call: OpCall) -> None:
        inner = self.of(call.inputs[0]) if call.inputs else None
        if inner is None:
            return
        inner.read = inner.read | {call.site}
        if call.outputs and call.outputs[0] is not call.inputs[0]:
            output = call.outputs[0]
            amount = _amount(output)
            self._known[output] = Term(
                *("cut", call.short, call.site, self.session.step, call.taint, inner.scalar),
                data=inner.data,
                amount=amount,
                parts=((inner, 1.0),),
            )

    def _build(self, call: OpCall, output: Tensor) -> Term:
        op = call.short.rstrip("_") if not call.short.startswith("__") else call.short
        if op.startswith("__i"):
            op = op.strip("_")[1:]
        many = output.numel() > 1
        inputs = [self.of(tensor) for tensor in call.inputs]
        data = many or any(term.data for term in inputs) or bool(call.numbers)
        term = Term(
            *("value", op, call.site, self.session.step, call.taint, not many, data),
            amount=_amount(output),
        )
        if not term.live:
            term.ratio = _is_ratio(op, call, inputs)
            linear = op in _ADD | _SUB | _MUL | _DIV | LINEAR or op == "neg"
            term.parts = tuple((t, math.nan) for t in inputs if t.scalar or linear)
            return term
        self._linear(op, term, call)
        return term

    def _linear(self, op: str, term: Term, call: OpCall) -> None:
        args = call.args
        if op in _ADD | _SUB | _RSUB and len(args) >= 2:
            alpha = call.kwargs.get("alpha", 1)
            second = -1.0 if op in _SUB else 1.0
            first = -1.0 if op in _RSUB else 1.0
            second = second * float(alpha) if isinstance(alpha, (int, float)) else math.nan
            pairs = [(_value(args[0], call), first), (_value(args[1], call), second)]
            term.kind = "sum"
            term.parts = tuple((self._operand(v), f) for v, f in pairs if v is not None)
        elif op == "neg":
            term.kind, term.parts = "sum", ((self.of(call.inputs[0]), -1.0),)
        elif op in _MUL | _DIV and len(args) >= 2:
            self._product(op, term, call)
        elif op in LINEAR:
            parts = [t for t in map(self.of, call.inputs) if t.live or op in ("stack", "cat")]
            term.kind, term.parts = "sum", tuple((t, 1.0) for t in parts)

    def _product(self, op: str, term: Term, call: OpCall) -> None:
        left, right = _value(call.args[0], call), _value(call.args[1], call)
        values = [self._operand(v) for v in (left, right) if v is not None]
        alive = [v for v in values if v.live]
        if len(values) == 1:
            number = call.args[0] if left is None else call.args[1]
            factor = float(number) if isinstance(number, (int, float)) else math.nan
            if op in _DIV:
                factor = 1.0 / factor if factor else math.nan
            term.kind, term.parts = "sum", ((values[0], factor),)
        elif len(alive) == 1:
            if op in _DIV:
                if alive[0] is values[0]:
                    term.kind, term.parts = "sum", ((alive[0], math.nan),)
            else:
                term.kind, term.parts = "scale", ((alive[0], math.nan),)
                term.factor = next(v for v in values if v is not alive[0])

    def _operand(self, value: Tensor | Number) -> Term:
        if isinstance(value, Tensor):
            return self.of(value)
        taint = value.taint
        return Term(
            *("cut", taint.op, taint.site, self.session.step, taint, True, True),
            amount=float(value.value),
        )


def _value(value: Any, call: OpCall) -> Tensor | Number | None:
    """A tensor or a number that came from one; None for the constants of the program."""
    if isinstance(value, Tensor):
        return value
    return next((number for number in call.numbers if number.value is value), None)


def _is_ratio(op: str, call: OpCall, inputs: list[Term]) -> bool:
    """One value over another, or a count over a number; sums of such are weights again."""
    if op in _RDIV:
        return True
    if op in _DIV and len(inputs) > 1:
        return True
    count = inputs[0].amount if inputs else None
    if op in _DIV and count is not None and float(count).is_integer():
        return True
    return op not in _ADD | _SUB | _RSUB and any(t.ratio for t in inputs)


def _address(tensor: Tensor) -> int | None:
    try:
        return tensor.data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None  # no memory behind it


def _counts(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or not tensor.requires_grad


def _amount(tensor: Tensor) -> float | None:
    """The value of a scalar that has no gradient: constants are told from data by it."""
    if tensor.numel() != 1 or tensor.requires_grad or tensor.is_complex():
        return None
    try:
        return float(tensor)
    except (RuntimeError, NotImplementedError):
        return None  # no numbers behind it: a meta tensor, one of torch.func's


def paths_down(root: Term, whole: set[int]) -> Iterator[Path]:
    """All ways down the sums of a loss; what is in `whole` is not taken apart."""
    stack = [Path(root, 1.0, ())]
    for _ in range(_PATHS):
        if not stack:
            return
        path = stack.pop()
        term = path.term
        if path.steps and id(term) in whole:
            yield path
            continue
        if term.kind != "sum" or not term.live:
            yield path
            continue
        for part, weight in term.parts:
            if part.live:
                steps = (*path.steps, (term, weight))
                stack.append(Path(part, path.factor * weight, steps))
