"""Class 32: an overlap that is minimised.

Dice and IoU are 2 * sum(p * t) / (sum(p) + sum(t)) and the like: 1 where prediction and mask agree.
Their loss is 1 minus them, or minus their logarithm. Where the quotient itself enters a loss with a
plus, every step drives the prediction away from the mask.

Known by its form: a sum of the prediction times data of 0 and 1, over a sum of prediction and data.
A share of the prediction (over its own sum) may be meant to be small, and a masked mean is divided
by a number.
"""

from __future__ import annotations

import ast

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import maximised
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord
from gradient_doctor.slips import statement_at, tree_of
from gradient_doctor.terms import Term, paths_down

_ENOUGH = 2  # steps
_LINEAR = {"sum", "mul", "add", "view", "reshape", "flatten", "float", "add_", "mul_", "__radd__"}
_KEEPS = {"sub", "clamp", "clamp_min", "clip", "__rsub__"}
_ADDS = {"add", "add_", "__radd__"}
_DIVIDES = {"div", "true_divide", "divide"}


class Overlaps(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._known = WeakIdKeyDictionary()  # products with a mask -> were they summed up?
        self._unions = WeakIdKeyDictionary()  # sums of a prediction and data
        self._quotients: list[Term] = []  # of this step; kept, so that no other takes their ids
        self._steps: dict[Site | None, set[int]] = {}

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs or not call.outputs[0].requires_grad:
            return
        short, result, source = call.short, call.outputs[0], call.inputs[0]
        if short in _DIVIDES and len(call.inputs) == 2 and source in self._known:
            if self._known[source] and call.inputs[1] in self._unions:
                self._quotients.append(self.session.ledger.terms.of(result))
            return
        if any(t in self._unions for t in call.inputs) and short in _LINEAR | _KEEPS:
            self._unions[result] = True
        elif short in _ADDS and len(call.inputs) == 2:
            data = [t for t in call.inputs if not t.requires_grad]
            if len(data) == 1 and data[0].is_floating_point():
                self._unions[result] = True
        if short == "mul" and len(call.inputs) == 2:
            left, right = call.inputs
            prediction, mask = (left, right) if left.requires_grad else (right, left)
            if not mask.requires_grad and left.shape == right.shape and self._is_mask(mask):
                # a loss for each place is no prediction: it is positive, and may exceed 1
                values = self.session.values(prediction)
                if values is not None and float(values.max()) <= 1 and float(values.min()) >= 0:
                    self._known[result] = False
        elif source in self._known and short in _LINEAR and len(call.inputs) == 1:
            numbers = [a for a in call.args[1:] if type(a) in (int, float)]
            if short not in ("mul", "mul_") or all(n > 0 for n in numbers):
                whole = short == "sum" and result.numel() < source.numel()
                self._known[result] = self._known[source] or whole

    def _is_mask(self, mask: Tensor) -> bool:
        values = self.session.values(mask)
        if values is None or values.numel() < 8:
            return False
        one = values == 1
        return bool((one | (values == 0)).all()) and bool(one.any()) and not bool(one.all())

    def step_ended(self, record: StepRecord) -> None:
        self._quotients.clear()

    def backward_starts(self, backward: Backward) -> None:
        if not self._quotients or backward.taint is None or backward.kind != "backward":
            return
        if maximised(self.session, backward):
            return
        whole = {id(term) for term in self._quotients}
        for root in backward.roots:
            term = self.session.ledger.terms.of(root)
            found = [p for p in paths_down(term, whole) if id(p.term) in whole]
            if id(term) in whole:
                self._say(term, term.site, backward)
            elif found and all(path.factor > 0 for path in found):
                self._say(found[0].term, found[0].term.site, backward)

    def _say(self, term: Term, site: Site | None, backward: Backward) -> None:
        steps = self._steps.setdefault(site, set())
        steps.add(backward.step)
        if len(steps) != _ENOUGH:
            return
        self.report(
            32,
            Severity.WARNING,
            "An overlap of prediction and mask is minimised.",
            why="The sum of the prediction times a mask, over a sum with both, is 1 where they "
            "agree. It enters the loss with a plus: every step drives them apart.",
            fix="Minimise 1 - dice.",
            site=_returned(site) or site,
            parameters=term.live,
            related=(site, backward.site),
        )


def _returned(site: Site | None) -> Site | None:
    """Where a function gives back what this line has assigned: there it would be turned."""
    made = statement_at(site) if site is not None else None
    target = made.targets[0] if isinstance(made, ast.Assign) else None
    tree = tree_of(site.file) if site is not None else None
    if site is None or tree is None or not isinstance(target, ast.Name):
        return None
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name != site.function:
            continue
        if not node.lineno <= site.line <= (node.end_lineno or node.lineno):
            continue
        for part in ast.walk(node):
            if not isinstance(part, ast.Return) or part.value is None:
                continue
            if any(isinstance(n, ast.Name) and n.id == target.id for n in ast.walk(part.value)):
                return Site(site.file, part.lineno, site.function)
    return None
