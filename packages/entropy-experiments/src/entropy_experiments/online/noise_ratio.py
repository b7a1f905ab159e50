"""What the steps of a noise scale say together: means, their intervals, and the ratio's.

The ratio tr(Sigma) / |G|^2 has Fieller's interval: all B for which the mean of noise - B signal may
be 0. It is bounded where |G|^2 differs from 0, and else has a lower end alone; no delta method says
that, and none is right there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal, NamedTuple

import torch
from scipy.special import stdtrit

from entropy_experiments.types import Influence
from entropy_experiments.types.estimate import CONFIDENCE

MIN_STEPS = 5
"""Fewer have no interval, as with prompts elsewhere."""
Metric = Literal["raw", "adam"]
METRICS: tuple[Metric, ...] = ("raw", "adam")


class StepSums(NamedTuple):
    """What is kept of a step, in one metric."""

    signal: float
    noise: float


@dataclass(frozen=True, kw_only=True)
class StepMean:
    """A mean over steps; without an interval where there are too few of them."""

    value: float
    stderr: float | None
    interval: tuple[float, float] | None
    free: float
    """Degrees of freedom of the interval."""

    def covers(self, truth: float) -> bool:
        return self.interval is not None and self.interval[0] <= truth <= self.interval[1]


@dataclass(frozen=True, kw_only=True)
class NoiseScaleEstimate:
    metric: Metric
    signal: StepMean
    """|G|^2; may be negative, as an unbiased estimate of nearly nothing must be at times."""
    noise: StepMean
    """tr(Sigma) of one sample."""
    critical_batch: float | None
    """tr(Sigma) / |G|^2; None where |G|^2 cannot be told from 0."""
    critical_batch_interval: tuple[float, float | None] | None
    """None as upper end: no upper bound. None: not even a lower one."""
    why_not: tuple[str, ...]
    """Why there is no critical batch, and what else to know."""
    steps: int
    skipped: int
    """Steps with a gradient that was not finite; none of their numbers is in here."""
    samples: float
    """Per step, in the mean: the batch that the critical one is to be compared with."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON: null where there is no number, never an infinity."""

        def mean(found: StepMean) -> dict[str, Any]:
            bar = None if found.interval is None else list(found.interval)
            return {"value": found.value, "stderr": found.stderr, "interval": bar}

        bar = self.critical_batch_interval
        return {
            "metric": self.metric,
            "signal": mean(self.signal),
            "noise": mean(self.noise),
            "critical_batch": self.critical_batch,
            "critical_batch_interval": None if bar is None else list(bar),
            "why_not": list(self.why_not),
            "steps": self.steps,
            "skipped": self.skipped,
            "samples": self.samples,
        }


def summarised(
    rows: Sequence[StepSums], metric: Metric, *, skipped: int, samples: float
) -> NoiseScaleEstimate:
    """`samples`: of a step, in the mean."""
    signal, noise = (_mean([row[i] for row in rows]) for i in range(2))
    value, interval, why_not = _ratio(rows, signal, noise)
    if skipped:
        why_not += (f"{skipped} steps with a non-finite gradient are left out",)
    return NoiseScaleEstimate(
        metric=metric,
        signal=signal,
        noise=noise,
        critical_batch=value,
        critical_batch_interval=interval,
        why_not=why_not,
        steps=len(rows),
        skipped=skipped,
        samples=samples,
    )


def _mean(values: Sequence[float]) -> StepMean:
    value = sum(values) / len(values)
    if len(values) < MIN_STEPS:
        return StepMean(value=value, stderr=None, interval=None, free=0.0)
    x = torch.tensor(values, dtype=torch.float64)
    steps = torch.arange(len(x))
    spread = Influence(
        value_C=(x - x.mean()) / len(x),
        prompt_C=steps,
        stratum_C=torch.zeros_like(steps),
        sample="steps",
    ).variance()
    assert spread is not None  # at least MIN_STEPS
    stderr, free = sqrt(spread[0]), spread[1]
    half = _t(free) * stderr
    return StepMean(value=value, stderr=stderr, interval=(value - half, value + half), free=free)


def _t(free: float) -> float:
    return float(stdtrit(free, 0.5 + CONFIDENCE / 2))


def _ratio(
    rows: Sequence[StepSums], signal: StepMean, noise: StepMean
) -> tuple[float | None, tuple[float, float | None] | None, tuple[str, ...]]:
    """(critical batch, its interval, why there is none)."""
    if signal.interval is None:
        said = f"{len(rows)} steps: an interval needs at least {MIN_STEPS}"
        return None, None, (f"{said}, and without one |G|^2 cannot be told from 0",)
    low, high = _fieller(rows, signal, noise)
    if low is not None and high is not None:
        return noise.value / signal.value, (low, high), ()
    bar = f"{signal.interval[0]:.3g} to {signal.interval[1]:.3g}"
    if signal.interval[1] < 0:
        said = f"|G|^2 came out below 0 ({bar}), which only chance or dependent microbatches do"
    else:
        said = (
            f"|G|^2 ({bar}) cannot be told from 0 well enough: the noise scale has no upper bound"
        )
    return None, None if low is None else (low, None), (f"{said}. Collect more steps",)


def _fieller(
    rows: Sequence[StepSums], signal: StepMean, noise: StepMean
) -> tuple[float | None, float | None]:
    """(low, high) of the B > 0 that fit; None: no such bound."""
    covariance = torch.cov(torch.tensor(rows, dtype=torch.float64).T) / len(rows)
    t = _t(min(signal.free, noise.free)) ** 2
    # B fits where a B^2 - 2 b B + c <= 0.
    a = signal.value**2 - t * float(covariance[0, 0])
    b = signal.value * noise.value - t * float(covariance[0, 1])
    c = noise.value**2 - t * float(covariance[1, 1])
    root = sqrt(max(b * b - a * c, 0.0))  # below 0 by rounding alone where it is used
    if a > 0:
        if signal.value <= 0:
            return None, None
        return max(c, 0.0) / (b + root), (b + root) / a
    # All B outside of the roots, of which c > 0 makes one negative: from the other one on.
    return (c / (b + root) if c > 0 and b + root > 0 else None), None
