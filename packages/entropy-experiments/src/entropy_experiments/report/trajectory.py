"""A run's entropy over its steps, as text for the terminal, and where its sums are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from entropy_experiments.results import Change, Number, TrajectoryTotal

if TYPE_CHECKING:
    from entropy_experiments.report.sections import Steps
    from entropy_experiments.types import Estimate

BAR = 30


class Step(Protocol):
    """What is shown of one step (`pipelines.trajectory.TrajectoryStep`)."""

    @property
    def step(self) -> int: ...
    @property
    def level(self) -> Estimate: ...
    @property
    def predicted(self) -> Estimate: ...
    @property
    def second_order(self) -> Estimate: ...
    @property
    def measured(self) -> Estimate: ...
    @property
    def reward(self) -> float | None: ...


HEADING = (
    f"{'step':>4}  {'reward':>6}  {'entropy':>7}  {'':{BAR}}  {'predicted':>9}  {'measured':>9}"
)


def step_line(step: Step, highest: float) -> str:
    """One row under HEADING; the bar is as long as the entropy is high."""
    bar = "█" * round(BAR * step.level.value / highest)
    reward = "" if step.reward is None else f"{step.reward:6.2f}"
    return (
        f"{step.step:>4}  {reward:>6}  {step.level.value:7.4f}  {bar:{BAR}}  "
        f"{step.predicted.value:+9.5f}  {step.measured.value:+9.5f}"
    )


def summed_changes(run: Steps, name: Change) -> list[float] | None:
    """A change summed up to each step; None: the run has no such sums."""
    sums: list[Number | None] = [step.get(f"{name}_sum") for step in run["steps"]]
    return None if sums[-1] is None else [one["value"] for one in sums if one is not None]


def last_step(run: Steps) -> int:
    """Where the run has come to: of a probed training, whose last row says it, or one step on."""
    return run.get("last_step", run["steps"][-1]["step"] + 1)


def best_prediction(total: TrajectoryTotal) -> Number | None:
    """The summed prediction of the highest order there is; None: nothing is summed."""
    return total.get("second_order") or total["predicted"]
