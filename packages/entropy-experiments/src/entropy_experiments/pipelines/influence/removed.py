"""What a command took out of a run directory, in words: the folder has the last command's answers.

An answer that was there and is not asked for again is gone from summary.json, and the HTML report
that showed it is gone too. Nothing is lost but time to type: stages are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from entropy_experiments.results import InfluenceResult
from entropy_experiments.study_files import PAGE


def told_removed(
    before: InfluenceResult | None, after: InfluenceResult, gone: Sequence[str], folder: Path
) -> list[str]:
    """`before`, `after`: summary.json; `gone`: files that were deleted. Empty: nothing was lost."""
    had, has = [] if before is None else _asked(before), _asked(after)
    lost = list(dict.fromkeys(answer[0] for answer in had if answer not in has))
    lines = []
    if lost:
        lines.append(
            f"{folder} answers the last command: answers of an earlier one, not asked for again, "
            f"were removed ({', '.join(lost)}). To have them back, add these to the command; "
            "what was computed for them is kept."
        )
    if PAGE in gone:
        lines.append(
            f"{folder / PAGE} showed the earlier answers and was removed. Write it again: "
            f"entropy-probe report {folder}"
        )
    return lines


def _asked(summary: InfluenceResult) -> list[tuple[str, str]]:
    """Each answer that a summary has: the option that asks for it, and of what."""
    options: list[tuple[str, str]] = []
    for evaluation in summary.get("evaluations", ()):
        answers = evaluation.get("what_if") or ()
        options += [(f"--what-if '{one['name']}'", "") for one in answers]
        confirmed = (one for one in answers if one.get("confirmation") is not None)
        options += [("--confirm", one["name"]) for one in confirmed]
        if evaluation.get("fisher") is not None:
            options.append(("--fisher", ""))
        budget = evaluation.get("entropy_budget")
        if budget is not None:
            options.append((f"--entropy-budget {budget['budget']:g}", ""))
    return options
