"""summary.json of a run's ledger: totals and lines, each with its standard error.

Visits are read one at a time. Of each, its estimates are added to the totals and a row of numbers
is kept; influence values and texts, which grow with the evaluation prompts, are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from entropy_experiments.attribution.run_ledger import ENTROPY, REWARD, TANGENT
from entropy_experiments.checkpoints.runs import provenance
from entropy_experiments.numerics.sums import tail_check
from entropy_experiments.pipelines.run_ledger.doubts import ledger_doubts
from entropy_experiments.pipelines.run_ledger.evaluation import FRESH
from entropy_experiments.pipelines.run_ledger.stored_estimates import unpack
from entropy_experiments.pipelines.run_ledger.window import ExplainOptions, Window
from entropy_experiments.results import RUN_LEDGER, JSONObject, RunLedgerResult, numbers
from entropy_experiments.results.run_ledger import LINES, Arrival, RunLine, RunStep
from entropy_experiments.types import Estimate
from entropy_experiments.types.estimate import LinearCombination

TOTALS = ("path", "tangent", "reward_path")
STEP_NUMBERS = (
    *("path_by_column", "batch", "decay", "uncovered", "momentum_before", "unfinished"),
    *("batch_reward", "rollouts", "tokens", "replayed", "lr"),
    *("step_distance", "gradient_distance", "clip_factor"),
)
"""Of a visit with a step."""


@dataclass(kw_only=True, eq=False)
class _Visits:
    """What the summary needs of all visits together."""

    totals: dict[str, LinearCombination] = field(
        default_factory=lambda: {name: LinearCombination() for name in TOTALS}
    )
    rows: list[JSONObject] = field(default_factory=list)
    """Numbers of each visit."""
    ends: list[JSONObject] = field(default_factory=list)
    """Fresh estimates of the first and the last."""
    step_notes: dict[str, None] = field(default_factory=dict)
    evaluation_notes: dict[str, None] = field(default_factory=dict)
    evaluation: JSONObject = field(default_factory=dict)
    """Of the first."""
    assumed: JSONObject = field(default_factory=dict)

    def add(self, facts: JSONObject) -> None:
        for name, total in self.totals.items():
            if (estimate := unpack(facts[name])) is not None:
                # Judged as a whole: a tail of one checkpoint is averaged out.
                total.add(1.0, replace(estimate, given_reasons=()))
        if not self.rows:
            self.evaluation, self.assumed = facts["evaluation"], facts["assumed"]
        if "fresh" in facts:
            self.ends.append(facts["fresh"])
        self.step_notes |= dict.fromkeys(facts.get("notes", ()))
        self.evaluation_notes |= dict.fromkeys(facts["evaluation_notes"])
        self.rows.append(
            {
                **{name: facts[name] for name in STEP_NUMBERS if name in facts},
                **{name: _level(facts[name]) for name in ("level", "reward")},
            }
        )

    def total(self, name: str) -> Estimate:
        total = self.totals[name].estimate()
        for influence in total.influences:
            for reason in tail_check(influence):
                total = total.doubted(reason)
        return total


def _level(packed: JSONObject | None) -> JSONObject | None:
    estimate = unpack(packed)
    return None if estimate is None else {"value": estimate.value, "stderr": estimate.stderr}


def ledger_summary(
    visits: Iterable[JSONObject],
    replays: Sequence[Arrival],
    window: Window,
    options: ExplainOptions,
    *,
    key: str,
    run: str,
) -> RunLedgerResult:
    """summary.json.

    Args:
        visits: What each visit kept, in the order of the checkpoints.
        replays: Where replays arrived.
        window: The checkpoints.
        options: How they were visited.
        key: What decides the numbers.
        run: Name of the run.
    """
    seen = _Visits()
    for facts in visits:
        seen.add(facts)
    steps, (first, last) = seen.rows[:-1], seen.ends
    rewarded = seen.rows[0]["reward"] is not None
    start, end = (unpack(x["level"]) for x in (first, last))
    assert start is not None and end is not None  # both ends have fresh rollouts
    path = seen.total("path")
    measured = end - start
    unexplained = measured - path
    tangent = seen.total("tangent") if options.tangent else None
    lines = {name: _line(name, steps, rewarded=rewarded) for name in LINES}
    reward_path = seen.total("reward_path") if rewarded else None
    reward_ends = [unpack(x["reward"]) for x in (first, last)]
    earned = missed = None
    if reward_path is not None and reward_ends[0] is not None and reward_ends[1] is not None:
        earned = reward_ends[1] - reward_ends[0]
        missed = earned - reward_path
    why_not = [*path.why_not, *ledger_doubts(steps, window, replays, unexplained)]
    if reward_path is not None:
        why_not += [f"reward: {reason}" for reason in reward_path.why_not]
    if missed is not None and missed.interval is not None and not missed.covers(0.0):
        why_not.append(
            f"reward: the path leaves {missed.value:.3g} of the measured change unexplained, "
            "more than chance"
        )
    unfinished = steps[-1]["unfinished"]
    notes = seen.step_notes | seen.evaluation_notes
    if options.training_prompts:
        notes["evaluated on the run's own prompts, with fresh responses"] = None
    if not rewarded:
        notes["no rewards: the reward functions cannot be called here"] = None
    summary: JSONObject = {
        **RUN_LEDGER.stamp,
        "key": key,
        "run": run,
        "window": {
            "from": window.start,
            "to": window.end,
            "steps": len(window.steps),
            "every": options.every,
        },
        "entropy": {
            "start": numbers(start),
            "end": numbers(end),
            "unit": path.estimand.unit,
        },
        "reward": None
        if earned is None
        else {
            name: numbers(cast(Estimate, x))
            for name, x in zip(("start", "end"), reward_ends, strict=True)
        },
        "total": {
            "path": numbers(path),
            "tangent": None if tangent is None else numbers(tangent),
            "reward": None if reward_path is None else numbers(reward_path),
        },
        "lines": lines,
        "memo": {
            "unfinished": {
                "dH": sum(unfinished[name] for name in ENTROPY),
                "dR": sum(unfinished[name] for name in REWARD) if rewarded else None,
            }
        },
        "measured": numbers(measured),
        "measured_reward": None if earned is None else numbers(earned),
        "unexplained": numbers(unexplained),
        "unexplained_reward": None if missed is None else numbers(missed),
        "steps": [
            _step_row(step, facts, rewarded=rewarded, tangent=options.tangent)
            for step, facts in zip(window.steps, steps, strict=True)
        ],
        "replays": list(replays),
        "evaluation": {**seen.evaluation, "fresh_responses": FRESH},
        "trusted": not why_not,
        "why_not": why_not,
        "notes": list(notes),
        "assumed": seen.assumed,
        "provenance": provenance(),
    }
    return cast(RunLedgerResult, summary)


def _line(name: str, steps: Sequence[JSONObject], *, rewarded: bool) -> RunLine:
    """One line of the ledger; its standard error from the two halves."""
    kinds = {"batches": "batch", "decay": "decay", "uncovered": "uncovered"}
    parts = [steps[0]["momentum_before"]] if name not in kinds else [s[kinds[name]] for s in steps]

    def half(column: str) -> float:
        return sum(part[column] for part in parts)

    a, b = (half(column) for column in ENTROPY)
    gains = [half(column) for column in REWARD] if rewarded else None
    return {
        "dH": a + b,
        "stderr": abs(a - b),
        "dR": None if gains is None else sum(gains),
        "dR_stderr": None if gains is None else abs(gains[0] - gains[1]),
    }


def _step_row(step: int, facts: JSONObject, *, rewarded: bool, tangent: bool) -> RunStep:
    def of(name: str, columns: Sequence[str]) -> float:
        return sum(facts[name][column] for column in columns)

    level, reward = facts["level"], facts["reward"]
    return {
        "step": step,
        "entropy": level["value"],
        "entropy_stderr": level["stderr"],
        "reward": None if reward is None else reward["value"],
        "batch_reward": facts["batch_reward"],
        "rollouts": facts["rollouts"],
        "tokens": facts["tokens"],
        "dH_path": of("path_by_column", ENTROPY),
        "dH_tangent": facts["path_by_column"][TANGENT] if tangent else None,
        "dR_path": of("path_by_column", REWARD) if rewarded else None,
        "dH_batches": of("batch", ENTROPY),
        "dR_batches": of("batch", REWARD) if rewarded else None,
        "dH_decay": of("decay", ENTROPY),
        "dR_decay": of("decay", REWARD) if rewarded else None,
        "dH_uncovered": of("uncovered", ENTROPY),
        "dR_uncovered": of("uncovered", REWARD) if rewarded else None,
        "replayed": facts["replayed"],
        "step_distance": facts["step_distance"],
        "gradient_distance": facts["gradient_distance"],
        "clip_factor": facts["clip_factor"],
        "lr": facts["lr"],
    }
