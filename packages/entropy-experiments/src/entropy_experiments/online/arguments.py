"""Arguments of the adapters, looked at when they are given.

Later, in a training, a probe that finds a mistake can only switch itself off.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

from torch import nn

from entropy_experiments.models.compiled import refuse_compiled

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def check_counts(*, least: int = 1, **given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} is {value!r}; expected a whole number, at least {least}.")


def check_positive(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ValueError(f"{name} is {value!r}; expected a number above 0.")


def check_order(order: Any) -> None:
    if isinstance(order, bool) or order not in (1, 2):
        raise ValueError(
            f"order is {order!r}; expected 1 (the straight line) or 2 (with its curvature, for one "
            "more pass without gradients before the step)."
        )


def check_bare(model: Any) -> None:
    if isinstance(model, WRAPPERS):
        raise ValueError(
            f"model is a {type(model).__name__}; expected the bare model inside it, whose "
            "parameters have their own names: give model.module."
        )
    refuse_compiled(model)
