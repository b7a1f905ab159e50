"""The learning rate that spends an entropy budget.

    b = s x + q x^2 / 2            s, q: slope and curvature of H per unit learning rate x
    linear          x = b / s
    with curvature  x = 2 b / (s + sign(s) sqrt(s^2 + 2 q b))     the smallest positive root

The second has no solution where the parabola turns at x = -s / q before it gets to b; the entropy
it has reached there, -s^2 / (2 q), is the most that this update can do to second order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import copysign, isfinite, sqrt

from entropy_experiments.estimate.curvature import LINEAR_TOLERANCE, linear_range


@dataclass(frozen=True, kw_only=True)
class EntropyBudget:
    """Learning rates that change H by `budget` nats."""

    budget: float
    linear: float
    curved: float | None
    """With curvature; None: not reached before the parabola turns, or no curvature is known."""
    linear_range: float | None
    """Up to this learning rate the bend is within 10 % of the slope's share; None: not known."""
    notes: tuple[str, ...]

    @property
    def learning_rate(self) -> float:
        """The one with curvature."""
        if self.curved is None:
            raise ValueError(f"No learning rate spends {self.budget:+.4g} nats: {self.notes[0]}.")
        return self.curved

    def __str__(self) -> str:
        head = f"{self.budget:+.4g} nats: learning rate {self.linear:.4g} by the slope alone"
        if self.linear_range is not None:
            curved = "none" if self.curved is None else f"{self.curved:.4g}"
            head += f", {curved} with curvature"
        return "\n".join([head, *(f"  {note}" for note in self.notes)])


def entropy_budget(slope: float, curvature: float | None, budget: float) -> EntropyBudget:
    """Where H has changed by `budget` nats (negative: entropy spent) along this update.

    `slope` and `curvature` are those of the whole step, momentum and decay included, per unit
    learning rate: all three scale with it. `curvature` is None where there is none (top_p < 1).
    """
    for name, value in (("slope", slope), ("curvature", curvature), ("budget", budget)):
        if value is not None and not isfinite(value):
            raise ValueError(f"{name} is {value}; expected a finite number.")
    if budget == 0:
        raise ValueError("The entropy budget is 0; expected a change in nats, such as -0.05.")
    if slope == 0:
        raise ValueError(
            "The slope is 0: to first order no learning rate changes the entropy. Take another "
            "update batch."
        )
    if (budget > 0) != (slope > 0):
        moves, asked = ("raises", "fall") if slope > 0 else ("lowers", "rise")
        raise ValueError(
            f"The entropy budget is {budget:+.4g} nats, but this update {moves} entropy (slope "
            f"{slope:+.4g} nats per unit learning rate): no small step makes it {asked}. Give the "
            f"budget the other sign ({-budget:+.4g}), or change the update."
        )
    if curvature is None:
        note = (
            "no curvature is known (there is none under top_p < 1), so neither is how far the "
            "slope holds: confirm by measuring that step"
        )
        return EntropyBudget(
            budget=budget, linear=budget / slope, curved=None, linear_range=None, notes=(note,)
        )
    straight = linear_range(slope, curvature)
    inside = slope**2 + 2 * curvature * budget
    notes, curved = [], None
    if inside < 0:
        notes.append(
            f"with curvature the budget is not reached: the entropy turns at learning rate "
            f"{-slope / curvature:.4g}, after {-(slope**2) / (2 * curvature):+.4g} nats"
        )
    else:
        curved = 2 * budget / (slope + copysign(sqrt(inside), slope))
    if (curved or budget / slope) > straight:
        notes.append(
            f"outside the linear range (up to learning rate {straight:.4g}, where curvature is "
            f"{LINEAR_TOLERANCE:.0%} of the slope's share): confirm by measuring that step"
        )
    return EntropyBudget(
        budget=budget,
        linear=budget / slope,
        curved=curved,
        linear_range=straight,
        notes=tuple(notes),
    )
