"""The ledger's line "momentum" as the batches it came from: lines that add up to it.

    batches 20 to 26      the newest ones, which hold half of the weight
    batches 0 to 19       those before
    batches before 0      what the moment held when the first of them was drawn
    coupled decay         of earlier steps
    not covered           what the stored moments hold besides these batches

Batch N is that of step N; a line that is exactly 0 is left out. Standard errors are over evaluation
prompts, as those of all lines.
"""

from __future__ import annotations

from entropy_experiments.report.words import contains_zero
from entropy_experiments.results import EvaluationBatch, LedgerLine, Ledgers, MomentumAnswer
from entropy_experiments.results.influence import MomentumBatch, MomentumPart, MomentumShare

MOMENTUM = "momentum"
NAMED = 5
"""Batches that are named, of most influence."""
NOTE = (
    "batch N is that of step N: what earlier batches do in this step is its momentum; the reward's "
    "is one line"
)


def split_of(evaluation: EvaluationBatch) -> MomentumAnswer | None:
    """The batches; None: the momentum is one line, or was split in a form of before."""
    momentum = evaluation.get("momentum")
    return None if not momentum or "parts" not in momentum else momentum


def one_line_because(evaluation: EvaluationBatch) -> str | None:
    """Why the momentum was not split; None: it was, or nobody wanted it."""
    momentum = evaluation.get("momentum")
    return momentum["error"] if momentum and "error" in momentum else None


def shown_ledgers(evaluation: EvaluationBatch) -> Ledgers:
    """The ledgers, the entropy's with its momentum split; the reward's has one line of it."""
    ledgers, momentum = evaluation["ledger"], split_of(evaluation)
    if momentum is None:
        return ledgers
    entropy = ledgers["entropy"]
    lines: dict[str, LedgerLine] = {}
    for name, line in entropy["lines"].items():
        lines |= momentum_lines(momentum) if name == MOMENTUM else {name: line}
    return {
        "entropy": {**entropy, "lines": lines, "notes": [*entropy["notes"], NOTE]},
        "reward": ledgers.get("reward"),
    }


def momentum_lines(momentum: MomentumAnswer) -> dict[str, LedgerLine]:
    """Lines in place of the one, by name; they add up to `total`."""
    lines = {_name(part): _line(part) for part in momentum["parts"]}
    lines[f"batches before {momentum['from']}"] = _line(momentum["before_record"])
    lines["coupled decay"] = {"this_step": momentum["decay"], "eventual": 0.0}
    lines["not covered"] = {"this_step": momentum["uncovered"], "eventual": 0.0}
    return {name: line for name, line in lines.items() if line["this_step"]}


def largest(momentum: MomentumAnswer) -> list[MomentumBatch]:
    """The batches of most influence among those whose interval does not contain 0."""
    sure = [
        one
        for one in momentum["batches"]
        if one["interval"] is not None
        and not contains_zero({"value": one["dH"], "interval": one["interval"]})
    ]
    return sorted(sure, key=lambda one: -abs(one["dH"]))[:NAMED]


def _name(part: MomentumPart) -> str:
    if part["from"] == part["to"]:
        return f"batch {part['to']}"
    return f"batches {part['from']} to {part['to']}"


def _line(share: MomentumShare | MomentumPart) -> LedgerLine:
    """Momentum does nothing in the long run: it is credited to the batches it came from."""
    return {
        "this_step": share["dH"],
        "eventual": 0.0,
        "stderr": share["stderr"],
        "interval": share["interval"],
    }
