"""Class 3: an inner step whose gradient is a constant for the outer loss.

Meta-learning steps away from the weights, `fast = w - rate * g`, and goes back from a loss of the
fast weights. `autograd.grad` gives gradients without a graph unless `create_graph=True`: then the
outer loss is differentiated as if the inner step had been the same for all weights. That is
first-order MAML, which is meant where the program says so (`create_graph=False`, or a word for it).
"""

from __future__ import annotations

import ast
import linecache
import re
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Backward, Detector, OpCall, Session
from gradient_doctor.sites import is_user_file
from gradient_doctor.slips import statement_at
from gradient_doctor.taint import GRAD

_ADDS = {"sub", "add", "subtract", "__isub__", "__iadd__"}
_TAKES = {"sub", "subtract", "__isub__"}
_ENOUGH = 2  # steps
_MEANT = re.compile(r"first.?order|fomaml|reptile|sharpness|perturb|advers", re.IGNORECASE)


@dataclass
class Inner:
    """The weights that one line's gradients have moved."""

    mask: int = 0
    steps: set[int] = field(default_factory=set)
    said: bool = False


class InnerUpdates(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._fast = WeakIdKeyDictionary()  # weights after an inner step
        self._inner: dict[Site, Inner] = {}

    def op(self, call: OpCall) -> None:
        """`w - rate * g`, where g is the gradient of a loss that depends on w."""
        if call.short not in _ADDS or len(call.inputs) != 2 or not call.outputs:
            return
        weight, step = call.inputs
        if not weight.requires_grad or step.requires_grad or weight.shape != step.shape:
            return
        if call.short in _ADDS - _TAKES and not _is_negative(call):
            return  # uphill: the worst weights near by, which no loss is differentiated through
        mask = self._of_weights(weight)
        taint = self.session.taint_of(step) if mask else None
        for cut in taint.cuts if taint is not None else ():
            if cut.op == GRAD and cut.site is not None and cut.depends & mask:
                self._fast[call.outputs[0]] = mask
                self._inner.setdefault(cut.site, Inner()).mask |= mask

    def _of_weights(self, tensor: Tensor) -> int:
        """The bit of a weight, or that of the weight that was stepped away from."""
        if tensor in self._fast:
            return self._fast[tensor]
        registry = self.session.registry
        return registry.bit(tensor) & registry.owned if tensor.is_leaf else 0

    def backward_starts(self, backward: Backward) -> None:
        if not self._inner or backward.kind != "backward" or backward.taint is None:
            return
        for cut in backward.taint.cuts:
            inner = self._inner.get(cut.site) if cut.op == GRAD and cut.site else None
            if inner is None or inner.said or not backward.taint.live & inner.mask:
                continue
            inner.steps.add(backward.step)
            if len(inner.steps) >= _ENOUGH:
                inner.said = True
                self._say(cut.site, inner, backward)

    def _say(self, site: Site | None, inner: Inner, backward: Backward) -> None:
        if site is None or not is_user_file(site.file) or _is_meant(site):
            return
        many = self.session.registry.many(inner.mask)
        self.report(
            3,
            Severity.WARNING,
            "The gradients of an inner step have no graph: the outer loss cannot be "
            "differentiated through the step.",
            why=f"{many} are moved along the results of this {GRAD}, and the loss at "
            f"{backward.site} is computed with the moved weights. Without create_graph=True the "
            "results are constants: what the outer loss learns is a first-order approximation.",
            fix="Pass create_graph=True there. If the approximation is meant (FOMAML), write "
            "create_graph=False.",
            site=site,
            parameters=inner.mask,
            related=(backward.site,),
        )


def _is_negative(call: OpCall) -> bool:
    """Whether a minus stands in the sum: `w + -rate * g`, `torch.add(w, g, alpha=-rate)`."""
    alpha = call.kwargs.get("alpha", 1)
    statement = statement_at(call.site) if call.site is not None else None
    return (isinstance(alpha, (int, float)) and alpha < 0) or any(
        isinstance(node, ast.USub) for node in (ast.walk(statement) if statement else ())
    )


def _is_meant(site: Site) -> bool:
    """Whether the program chooses: it passes `create_graph`, or has a word for what it does."""
    statement = statement_at(site)
    for node in ast.walk(statement) if statement is not None else ():
        if isinstance(node, ast.keyword) and node.arg in ("create_graph", None):
            return True
    return bool(_MEANT.search("".join(linecache.getlines(site.file))))
