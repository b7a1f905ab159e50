"""What `gradient-doctor fix` prints, and its JSON."""

from __future__ import annotations

import math
import os
from typing import Any

from gradient_doctor.findings import Finding, count, listed
from gradient_doctor.fix.judge import ends
from gradient_doctor.fix.search import Attempt, Fix, Outcome
from gradient_doctor.fix.trial import Trial

SCHEMA = 1


def report(outcome: Outcome, steps: int) -> str:
    """The findings with their fixes, the diff last."""
    before = outcome.before
    parts = [f"gradient_doctor fix: as it is, {_run(before)}."]
    if before.error is not None:
        parts.append(f"It ends with {before.error.splitlines()[0]}")
    if not before.serious:
        parts.append(_nothing(before, steps))
    shown: list[Fix] = []
    for number, attempt in enumerate(outcome.attempts, start=1):
        parts.append(_attempt(number, attempt, before, shown))
    if outcome.whole is not None:
        if len(shown) > 1:
            parts.append(_together(outcome, before))
        parts.append(outcome.whole.diff.rstrip("\n"))
    return "\n\n".join(parts)


def _nothing(before: Trial, steps: int) -> str:
    if before.error is not None:
        tail = "\n".join(f"  | {line}" for line in before.output.splitlines()[-8:])
        return f"There is no finding to fix. The end of its output:\n{tail}"
    if before.steps == 0:
        return "No training step was seen: there is nothing to fix."
    return (
        f"No finding of warning or above in {count(before.steps, 'step')}: nothing to fix. "
        f"(At most {steps} steps are run; --steps N runs more.)"
    )


def _run(trial: Trial) -> str:
    moving = sum(distance > 0 for distance in trial.moved.values())
    text = f"{count(trial.steps, 'step')}, {_loss(trial)}"
    if trial.moved:
        text += f", {moving} of {count(len(trial.moved), 'parameter')} move"
    if trial.timed_out:
        text += " (stopped by the time limit)"
    return text


def _loss(trial: Trial) -> str:
    start, end = ends(trial.main_loss)
    return f"loss {_short(start)} to {_short(end)}" if trial.main_loss else "no loss seen"


def _short(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else str(value)


def _attempt(number: int, attempt: Attempt, before: Trial, shown: list[Fix]) -> str:
    finding = attempt.finding
    lines = [f"{number}. {_heading(finding)}"]
    if finding.site is not None:
        lines.append(f"   where: {_place(finding)}")
    fix = attempt.fix
    if fix is None:
        lines.append("   no fix is offered:")
        lines += [f"   - {reason}" for reason in attempt.reasons]
        lines.append(f"   advice: {finding.fix}")
    elif any(fix is other for other in shown):
        lines.append(
            f"   fix:   the one of {1 + [f is fix for f in shown].index(True)} mends it too."
        )
    else:
        shown.append(fix)
        lines.append(f"   fix:   {' '.join(fix.what)}")
        lines += [f"   {line}" for line in _changes(fix, before)]
        lines += [f"   check: {caution}" for caution in fix.cautions]
    return "\n".join(lines)


def _heading(finding: Finding) -> str:
    return f"{finding.severity.name} [{finding.number} {finding.slug}] {finding.what}"


def _place(finding: Finding) -> str:
    assert finding.site is not None
    path = os.path.relpath(finding.site.file)
    return f"{finding.site.file if path.startswith(os.pardir) else path}:{finding.site.line}"


def _changes(fix: Fix, before: Trial) -> list[str]:
    verdict, after = fix.verdict, fix.after
    gone = "the finding is" if len(verdict.gone) == 1 else f"{len(verdict.gone)} findings are"
    lines = [f"tried: {count(after.steps, 'step')}; {gone} gone, no new one."]
    if before.error is not None:
        lines.append(f"       before: {before.error.splitlines()[0]}")
    if verdict.now_move:
        lines.append(f"       now move ({len(verdict.now_move)}): {listed(verdict.now_move, 4)}")
    if verdict.move_differently:
        names = verdict.move_differently
        lines.append(f"       move differently ({len(names)}): {listed(names, 4)}")
    lines.append(f"       {_loss(before)} before, {_loss(after).removeprefix('loss ')} after")
    return lines


def _together(outcome: Outcome, before: Trial) -> str:
    assert outcome.whole is not None
    lines = ["Together: " + " ".join(outcome.whole.what)]
    lines += [f"   {line}" for line in _changes(outcome.whole, before)]
    lines += [f"   {reason}" for reason in outcome.left_out]
    return "\n".join(lines)


# JSON


def as_json(outcome: Outcome, **about: Any) -> dict[str, Any]:
    """See docs/doctor_fix.md."""
    return {
        "schema": SCHEMA,
        **about,
        "before": _trial(outcome.before),
        "findings": [_entry(attempt) for attempt in outcome.attempts],
        "fix": None if outcome.whole is None else _fix(outcome.whole),
        "left_out": list(outcome.left_out),
    }


def _entry(attempt: Attempt) -> dict[str, Any]:
    return {
        "finding": attempt.finding.to_dict(),
        "proven": attempt.fix is not None,
        "fix": None if attempt.fix is None else _fix(attempt.fix),
        "not_offered": list(attempt.reasons),
    }


def _fix(fix: Fix) -> dict[str, Any]:
    return {
        "what": list(fix.what),
        "check": list(fix.cautions),
        "diff": fix.diff,
        "files": sorted(fix.edits),
        "gone": [f.to_dict() for f in fix.verdict.gone],
        "now_move": list(fix.verdict.now_move),
        "move_differently": list(fix.verdict.move_differently),
        "after": _trial(fix.after),
    }


def _trial(trial: Trial) -> dict[str, Any]:
    def number(value: float) -> float | str:
        return value if math.isfinite(value) else str(value)  # JSON has no NaN

    return {
        "steps": trial.steps,
        "losses": {where: [number(v) for v in values] for where, values in trial.losses.items()},
        "moved": {name: number(value) for name, value in trial.moved.items()},
        "findings": [f.to_dict() for f in trial.findings],
        "error": trial.error,
        "timed_out": trial.timed_out,
    }
