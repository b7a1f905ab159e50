"""Estimates of summary.json in words: numbers as `results.numbers` writes them."""

from __future__ import annotations

from entropy_experiments.results import AnyNumber

AGREEMENT = 0.1
"""Of the measured change: how much one or two orders may leave over and still agree with it."""


def value_of(estimate: AnyNumber) -> float:
    return estimate["value"]


def spoken(estimate: AnyNumber) -> str:
    """A change with its interval, signs always shown."""
    interval = estimate["interval"]
    bar = "no interval" if interval is None else f"95% {interval[0]:+.3g} to {interval[1]:+.3g}"
    return f"{value_of(estimate):+.4g} nats ({bar})"


def contains_zero(estimate: AnyNumber) -> bool:
    interval = estimate.get("interval")
    return interval is not None and interval[0] <= 0 <= interval[1]


def left_over(rest: AnyNumber, measured: AnyNumber) -> str:
    """What lines and curvature leave of the measured change, in words; `rest` has an interval.

    A paired interval is narrow: that it excludes 0 does not make what is left over large.
    """
    if contains_zero(rest):
        return "nothing"
    share = abs(value_of(rest) / value_of(measured)) if value_of(measured) else float("inf")
    if share <= AGREEMENT:
        return f"{share:.1%} of the change, so two orders suffice"
    return "the step is outside the range where two orders suffice"


def cell(value: float | None, width: int, form: str = "+.2e") -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"
