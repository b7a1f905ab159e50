"""What people read: one line per case, then what each wrong one means and how to mend it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

_NAMES = {"logprob": "log-prob", "surprisal": "-log-prob"}


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    quantity: str
    exposes: str
    verdict: str
    """right, wrong or not applicable."""
    expected: float | None = None
    got: float | None = None
    """At the worst token, sequence or number."""
    error_nats: float | None = None
    """The largest over the case; inf if there is no number."""
    scene: str = ""
    mistake: str = ""
    meaning: str = ""
    """What a wrong value means; why a case is not applicable."""
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Conformance:
    target: str
    called: str
    convention: str
    returns: tuple[str, ...]
    cases: tuple[Case, ...]

    @property
    def passed(self) -> bool:
        """No case is wrong, and at least one could be asked."""
        return not self.wrong and any(case.verdict == "right" for case in self.cases)

    @property
    def wrong(self) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if case.verdict == "wrong")

    def to_dict(self) -> dict[str, Any]:
        cases = [{k: _plain(v) for k, v in asdict(case).items()} for case in self.cases]
        return asdict(self) | {"passed": self.passed, "cases": cases}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def text(self) -> str:
        shift = {
            "sequence": "row t of the logits is about token t + 1; the function shifts",
            "aligned": "row t of the logits is about token t; the caller has shifted",
        }
        lines = [
            f"Entropy conformance of {self.target}",
            f"  called with {self.called}",
            f"  convention  {self.convention}: {shift[self.convention]}",
            f"  returns     {'; '.join(self.returns)}",
            "",
            f"  {'case':<17} {'of':<9} {'expected':>9} {'got':>9} {'error, nats':>12}  verdict",
        ]
        lines += [_row(case) for case in self.cases]
        for case in self.wrong:
            lines += ["", f"{case.name} ({_name(case)}): {case.mistake}", f"  on    {case.scene}",
                      f"  means {case.meaning}", f"  fix   {case.fix}"]  # fmt: skip
        skipped = [case for case in self.cases if case.verdict == "not applicable"]
        if skipped:
            lines += ["", "Not applicable, so not checked:"]
            lines += [f"  {case.name} ({_name(case)}): {case.meaning}" for case in skipped]
        return "\n".join([*lines, "", self._verdict(len(skipped))])

    def _verdict(self, skipped: int) -> str:
        right = len(self.cases) - len(self.wrong) - skipped
        counts = f"{right} right, {len(self.wrong)} wrong, {skipped} not applicable"
        return f"{'PASSED' if self.passed else 'FAILED'}: {counts}."


def _name(case: Case) -> str:
    return _NAMES.get(case.quantity, case.quantity)


def _row(case: Case) -> str:
    def number(x: float | None, spec: str) -> str:
        return "-" if x is None else format(x, spec)

    verdict = case.verdict + (f": {case.mistake}" if case.mistake else "")
    return (
        f"  {case.name:<17} {_name(case):<9} {number(case.expected, '.4f'):>9} "
        f"{number(case.got, '.4f'):>9} {number(case.error_nats, '.1e'):>12}  {verdict}"
    )


def _plain(value: Any) -> Any:
    """JSON has no inf and no NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
