"""Results that nobody takes: `scores.masked_fill(mask, -1e9)` as a statement of its own.

Methods without an underscore leave their tensor as it is and return a new one. As a statement such
a call does nothing. The class is that of what should have happened: a mask (19), a cut between
steps (14), an exchange of axes (33), a change of values that the loss does not see (23).
"""

from __future__ import annotations

import ast

from gradient_doctor.detectors.common import live_in
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, OpCall, Session
from gradient_doctor.slips import statement_at

_NUMBERS = {
    **dict.fromkeys(("masked_fill", "where", "masked_scatter", "index_fill"), 19),
    "detach": 14,
    **dict.fromkeys(("permute", "transpose", "view", "reshape", "unsqueeze", "squeeze"), 33),
    **dict.fromkeys(("clamp", "clip", "div", "mul", "add", "sub", "softmax", "log_softmax"), 23),
    **dict.fromkeys(("normalize", "dropout", "sigmoid", "tanh", "relu", "layer_norm"), 23),
}


class Dropped(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._looked: set[tuple[Site, str]] = set()

    def op(self, call: OpCall) -> None:
        number = _NUMBERS.get(call.short)
        if number is None or call.site is None or (call.site, call.short) in self._looked:
            return
        self._looked.add((call.site, call.short))
        live = live_in(self.session, call.inputs)
        if call.targets or not live or not call.outputs or not _is_statement(call):
            return
        self.report(
            number,
            Severity.WARNING,
            f"The result of `{call.short}` is dropped.",
            why=f"`{call.short}` returns a new tensor and leaves the old one as it is. As a "
            "statement of its own this line changes nothing.",
            fix=f"Assign it: x = x.{call.short}(...)"
            + (f", or use `{call.short}_`." if hasattr(call.outputs[0], f"{call.short}_") else "."),
            site=call.site,
            parameters=live,
        )


def _is_statement(call: OpCall) -> bool:
    """Whether the line is this call, and nothing takes what it gives."""
    statement = None if call.site is None else statement_at(call.site)
    value = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(value, ast.Call):
        return False
    called = value.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
    return name == call.short
