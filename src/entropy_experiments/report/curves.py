"""A run's entropy over its steps: as text for the terminal, as a figure for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
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


def draw_entropy(steps: Sequence[Step], last: Estimate, path: Path) -> None:
    """Fresh entropy at each checkpoint, and the changes predicted and measured, summed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    at = [step.step for step in steps]
    ends = [*at, at[-1] + 1]
    levels = [*(step.level for step in steps), last]
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    low, high = zip(*(level.interval or (level.value, level.value) for level in levels))
    axes.fill_between(ends, low, high, color="0.85", label="fresh rollouts, 95 %")
    axes.plot(ends, [level.value for level in levels], color="0.4", linewidth=1)
    for name, style, colour in (("predicted", "--", "C0"), ("measured", ":", "C3")):
        summed = [levels[0].value]
        for step in steps:
            summed.append(summed[-1] + getattr(step, name).value)
        axes.plot(ends, summed, style, color=colour, linewidth=2, label=f"{name}, summed")
    axes.set(xlabel="optimizer step", ylabel="policy entropy, nats per token")
    rewards = [step.reward for step in steps]
    if all(reward is not None for reward in rewards):
        right = axes.twinx()
        right.plot(at, rewards, color="C2", linewidth=1, alpha=0.7)  # pyright: ignore[reportArgumentType]
        right.set_ylabel("reward of the update batch", color="C2")
        right.set_ylim(0, 1)
    axes.legend(frameon=False, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
