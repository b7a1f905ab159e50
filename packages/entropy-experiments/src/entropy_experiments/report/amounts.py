"""Estimates of summary.json in words: numbers as `findings.numbers` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Numbers = Mapping[str, Any]


def value_of(estimate: Numbers) -> float:
    return float(estimate["value"])


def spoken(estimate: Numbers) -> str:
    """A change with its interval, signs always shown."""
    interval = estimate["interval"]
    bar = "no interval" if interval is None else f"95% {interval[0]:+.3g} to {interval[1]:+.3g}"
    return f"{value_of(estimate):+.4g} nats ({bar})"


def contains_zero(estimate: Numbers) -> bool:
    interval = estimate["interval"]
    return interval is not None and interval[0] <= 0 <= interval[1]


def cell(value: float | None, width: int, form: str = "+.2e") -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"
