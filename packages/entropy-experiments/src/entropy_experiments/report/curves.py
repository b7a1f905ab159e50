"""A run's entropy over its steps, as text for the terminal."""

from __future__ import annotations

from typing import Protocol

from entropy_experiments.types import Estimate

BAR = 30


class Step(Protocol):
    """What is shown of one step (`entropy_trajectory.TrajectoryStep`)."""

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
