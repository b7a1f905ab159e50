"""Gradients that cancel: what one part of a sum passes back, another takes away again (20, 23).

`rest - (rest + (code - rest).detach())` has the value of `rest - code` and, for `rest`, the slope
0: a straight-through output carries the gradient of its input. `x + (q - x)` without a `detach` is
q alone. Autograd walks both ways and adds up to zero; nothing in the graph shows it. So each tensor
is kept as a sum of others with signs, as long as it is one element by element; what has the
factor 0 is connected, and learns nothing from it.

A difference in which something else is left, `(z + delta) - z`, is meant: it is delta. Sums with
weights are left alone too: a mixture whose weight is 1 in this step has another in the next.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.explain import Ledger
from gradient_doctor.findings import Severity, Site
from gradient_doctor.readable import values_of
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord
from gradient_doctor.sites import is_user_file
from gradient_doctor.terms import Term

_SIGNS = {"add": (1, 1), "__iadd__": (1, 1), "add_": (1, 1), "__radd__": (1, 1)}
_SIGNS |= {"sub": (1, -1), "subtract": (1, -1), "__isub__": (1, -1), "sub_": (1, -1)}
_SIGNS |= {"rsub": (-1, 1), "__rsub__": (-1, 1)}
_SAME = {"clone", "contiguous"}
_MOST = 16  # parts of one sum
_ENOUGH = 2  # steps


@dataclass(frozen=True)
class Form:
    """A tensor as a sum: the sign by part, and the parameters that are alive in each part."""

    signs: dict[int, int]
    live: dict[int, int]

    @property
    def moves(self) -> int:
        """The parameters that the gradient of the whole can move."""
        mask = 0
        for part, sign in self.signs.items():
            mask |= self.live[part] if sign else 0
        return mask


@dataclass
class Line:
    """A line whose result is connected to parameters that its gradient cannot move."""

    site: Site
    whole: bool  # nothing else is left in it
    lost: int = 0
    steps: set[int] = field(default_factory=set)


class SignedSums(Detector):
    """Follows sums from their parts to the loss that they enter."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._forms = WeakIdKeyDictionary()
        self._count = itertools.count()
        # tensors -> the line that has cancelled all gradients behind them
        self._dead = WeakIdKeyDictionary()
        self._terms: dict[int, tuple[Term, Line]] = {}  # scalars of such tensors alone
        self._lines: dict[tuple[str, int], Line] = {}

    @property
    def ledger(self) -> Ledger:
        return self.session.ledger

    # sums

    def op(self, call: OpCall) -> None:
        result = call.outputs[0] if call.outputs else None
        if result is None or not result.requires_grad:
            return
        if call.short in _SIGNS and len(call.args) == 2 and not call.kwargs:
            if self._add_up(call, result):
                return
        elif call.short == "neg" and call.inputs:
            form = self._form(call.inputs[0])
            self._forms[result] = Form({p: -s for p, s in form.signs.items()}, form.live)
        elif call.short in _SAME and call.inputs[0] in self._forms:
            self._forms[result] = self._forms[call.inputs[0]]
        else:
            for target in call.targets:
                self._forms.pop(target, None)
        if self._dead:
            self._pass_on(call, result)

    def _form(self, tensor: Tensor) -> Form:
        form = self._forms.get(tensor)
        if form is None:
            if not tensor.requires_grad:
                return Form({}, {})
            taint = self.session.taint_of(tensor)
            part = next(self._count)
            form = Form({part: 1}, {part: 0 if taint is None else taint.live})
            self._forms[tensor] = form
        return form

    def _add_up(self, call: OpCall, result: Tensor) -> bool:
        """Whether this sum is one whose gradients cancel."""
        left, right = (self._form(a) if isinstance(a, Tensor) else None for a in call.args)
        left, right = left or Form({}, {}), right or Form({}, {})
        first, second = _SIGNS[call.short]
        signs = {part: first * sign for part, sign in left.signs.items()}
        for part, sign in right.signs.items():
            signs[part] = signs.get(part, 0) + second * sign
        live = {**left.live, **right.live}
        if len(signs) > _MOST:
            self._forms.pop(result, None)
            return False
        form = self._forms[result] = Form(signs, live)
        if all(signs.values()):
            return False
        # what is 0 from now on is no part of the sum any more
        self._forms[result] = Form({p: s for p, s in signs.items() if s}, live)
        lost = 0 if call.taint is None else call.taint.live & ~form.moves
        if not lost or call.site is None or not is_user_file(call.site.file):
            return False
        values = values_of(result)
        if values is None or not bool(values.any()):
            return False  # `x - x` makes a zero that has a graph
        put_back = second > 0 and any(len(f.signs) > 1 for f in (left, right))
        if not form.moves or put_back:
            self._note(call, call.site, not form.moves, lost, result)
        return not form.moves

    def _note(self, call: OpCall, site: Site, whole: bool, lost: int, result: Tensor) -> None:
        line = self._lines.setdefault(site.place, Line(site, whole))
        line.lost |= lost
        if whole:
            self._dead[result] = line
        else:
            line.steps.add(self.session.step)

    def _pass_on(self, call: OpCall, result: Tensor) -> None:
        """Made of such tensors and of values without gradient alone, it has none either."""
        alive = [t for t in call.inputs if t.requires_grad]
        lines: list[Line] = [self._dead[t] for t in alive if t in self._dead]
        if not lines or len(lines) < len(alive):
            return
        line = lines[0]
        self._dead[result] = line
        if result.numel() == 1:
            term = self.ledger.terms.of(result)
            self._terms[id(term)] = (term, line)

    # losses

    def backward_starts(self, backward: Backward) -> None:
        if not self._terms or backward.taint is None:
            return
        stack = [self.ledger.terms.of(root) for root in backward.roots]
        seen: set[int] = set()
        while stack:
            term = stack.pop()
            if id(term) in seen:
                continue
            seen.add(id(term))
            if id(term) in self._terms:
                line = self._terms[id(term)][1]
                line.steps.add(self.session.step)
            else:
                stack += [part for part, _ in term.parts if part.live]

    def step_ended(self, record: StepRecord) -> None:
        self._forms.clear()
        self._dead.clear()
        self._terms.clear()
        if record.traced:
            self._say(_ENOUGH)

    def finish(self, error: BaseException | None) -> None:
        if error is None:
            self._say(1)

    def _say(self, enough: int) -> None:
        for place, line in list(self._lines.items()):
            lost = line.lost & self.ledger.should_train()
            if len(line.steps) < enough or not lost:
                continue
            del self._lines[place]
            self._report_whole(line, lost) if line.whole else self._report_part(line, lost)

    def _report_whole(self, line: Line, lost: int) -> None:
        many = self.session.registry.many(lost)
        self.report(
            23,
            Severity.WARNING,
            "A term of the loss is connected, but its gradient cancels: it changes the number, "
            "not the update.",
            why=f"Both sides of this sum pass the gradient of the same tensor, behind which are "
            f"{many}, with opposite signs: what arrives there is exactly 0. A straight-through "
            "output, x + (q - x).detach(), carries the gradient of x.",
            fix="Take the value alone on one side: rest = rest - q.detach().",
            site=line.site,
            parameters=lost,
        )

    def _report_part(self, line: Line, lost: int) -> None:
        many = self.session.registry.many(lost)
        self.report(
            20,
            Severity.WARNING,
            "A tensor is subtracted and added again: its gradient cancels.",
            why=f"x + (q - x) is q, in its value and in its gradient: {many} behind x get exactly "
            "0 from this line.",
            fix="A straight-through estimate keeps the gradient of x: x + (q - x).detach().",
            site=line.site,
            parameters=lost,
        )
