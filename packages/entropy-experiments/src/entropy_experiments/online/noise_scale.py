"""Gradient noise scale: how large a batch is worth its cost, from the microbatches of each step.

Microbatch i averages b_i independent samples, so its gradient is g_i = G + noise of covariance
Sigma / b_i. With N = sum b_i, S = sum b_i g_i and m microbatches, both of these are unbiased, for
microbatches of any sizes:

    |G|^2      = (|S|^2 - sum b_i^2 |g_i|^2) / (N^2 - sum b_i^2)      products of different i, j
    tr(Sigma)  = (sum b_i |g_i|^2 - |S|^2 / N) / (m - 1)              spread around the mean

    B_simple   = tr(Sigma) / |G|^2       in the units of b: samples, prompts, ...

|S / N|^2 in place of the first would be too large by tr(Sigma) / N: of pure noise it sees a signal.
In the Adam metric every |x|^2 above is x' P x, P the optimizer's preconditioner *before* the step:
one that has seen the step's own gradient is not independent of it.

A step needs S (one buffer of the gradient's size) and a few running sums. What is kept of it are
two numbers. Ranks add their sums, in one reduction when the step closes. Error bars come from the
spread over steps, so |G|^2 and tr(Sigma) are those of the average step; what training changes on
the way widens them.

The ratio tr(Sigma) / |G|^2 has Fieller's interval: all B for which the mean of noise - B signal may
be 0. It is bounded where |G|^2 differs from 0, and else has a lower end alone; no delta method says
that, and none is right there. P is read from the live optimizer (`adam_preconditioner`):

    P = (lr_group / lr) / (sqrt(v_hat) + eps)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import isfinite, sqrt
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from scipy.special import stdtrit
from torch import Tensor

from entropy_experiments.types import Influence
from entropy_experiments.types.estimate import CONFIDENCE

MIN_STEPS = 5
"""Fewer have no interval, as with prompts elsewhere."""
Metric = Literal["raw", "adam"]
METRICS: tuple[Metric, ...] = ("raw", "adam")
__all__ = ["METRICS", "NoiseScale", "NoiseScaleEstimate", "adam_preconditioner"]
CHUNK = 2**22
"""Elements worked on at a time: temporaries stay far below the buffer."""


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


class MeanResult(TypedDict):
    """A `StepMean` as JSON."""

    value: float
    stderr: float | None
    interval: list[float] | None


class NoiseScaleResult(TypedDict):
    """A `NoiseScaleEstimate` as JSON."""

    metric: Metric
    signal: MeanResult
    noise: MeanResult
    critical_batch: float | None
    critical_batch_interval: list[float | None] | None
    why_not: list[str]
    steps: int
    skipped: int
    samples: float


@dataclass(frozen=True, kw_only=True)
class NoiseScaleEstimate:
    metric: Metric
    signal: StepMean
    """|G|^2; may be negative, as an unbiased estimate of nearly nothing must be at times."""
    noise: StepMean
    """tr(Sigma) of one sample."""
    critical_batch: float | None
    """tr(Sigma) / |G|^2; None where |G|^2 cannot be distinguished from 0."""
    critical_batch_interval: tuple[float, float | None] | None
    """None as upper end: no upper bound. None: not even a lower one."""
    why_not: tuple[str, ...]
    """Why there is no critical batch, and what else to know."""
    steps: int
    skipped: int
    """Steps with a gradient that was not finite; none of their numbers is in here."""
    samples: float
    """Per step, in the mean: the batch that the critical one is to be compared with."""

    def as_dict(self) -> NoiseScaleResult:
        """For JSON: null where there is no number, never an infinity."""

        def mean(of_steps: StepMean) -> MeanResult:
            bar = None if of_steps.interval is None else list(of_steps.interval)
            return {"value": of_steps.value, "stderr": of_steps.stderr, "interval": bar}

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


def summarise_steps(
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
        reason = f"{len(rows)} steps: an interval needs at least {MIN_STEPS}"
        return None, None, (f"{reason}, and without one |G|^2 cannot be distinguished from 0",)
    low, high = _fieller(rows, signal, noise)
    if low is not None and high is not None:
        return noise.value / signal.value, (low, high), ()
    bar = f"{signal.interval[0]:.3g} to {signal.interval[1]:.3g}"
    if signal.interval[1] < 0:
        reason = f"|G|^2 came out below 0 ({bar}), which only chance or dependent microbatches do"
    else:
        reason = f"|G|^2 ({bar}) is not far enough from 0: the noise scale has no upper bound"
    return None, None if low is None else (low, None), (f"{reason}. Collect more steps",)


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


def adam_preconditioner(
    optimizer: Any, params: Mapping[str, Tensor]
) -> Mapping[str, Tensor] | None:
    """Of torch's Adam or AdamW as it is now; None before its first step.

    Made of the optimizer's own second moments, a tensor at a time when asked: nothing is copied.
    """
    return None if not any(optimizer.state.values()) else _AdamPreconditioner(optimizer, params)


class _AdamPreconditioner(Mapping[str, Tensor]):
    def __init__(self, optimizer: Any, params: Mapping[str, Tensor]) -> None:
        self._params, self._state = dict(params), optimizer.state
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        # Of all groups 0, as in the first step of a warm-up: then none is favoured.
        self._base = next((float(g["lr"]) for g in optimizer.param_groups if g["lr"]), None)
        self._group: dict[str, Mapping[str, Any]] = {}
        self._step: dict[str, float] = {}
        for name, p in params.items():
            group, state = groups.get(id(p)), self._state.get(p) or {}
            if group is None or "betas" not in group:
                raise ValueError(
                    f"{name!r} is not in an Adam group of the optimizer; expected every parameter "
                    "in one. Leave the preconditioner out for the raw noise scale."
                )
            if "exp_avg_sq" not in state:
                raise ValueError(
                    f"The optimizer has no exp_avg_sq for {name!r}; it has {sorted(state)}. "
                    "Expected torch's Adam or AdamW, with state for every parameter."
                )
            self._group[name], self._step[name] = group, float(state["step"])

    def __getitem__(self, name: str) -> Tensor:
        group, state = self._group[name], self._state[self._params[name]]
        step = self._step[name]
        if float(state["step"]) != step:
            raise ValueError(
                f"The optimizer has stepped since open_step (step {step:.0f} then, "
                f"{float(state['step']):.0f} now): its preconditioner has seen this gradient. Call "
                "close_step before optimizer.step()."
            )
        moment = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
        spread = (moment.detach() / (1 - group["betas"][1] ** step)).sqrt_().add_(group["eps"])
        share = 1.0 if self._base is None else float(group["lr"]) / self._base
        return spread.reciprocal_().mul_(share)

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


class NoiseScale:
    """Gradient noise scale and critical batch size, from the microbatch gradients of each step.

    It holds one buffer of the gradient's size.

    Args:
        params: Parameters that training moves, by name.
        window: How many of the last steps an estimate is computed from; None: all.

    Raises:
        ValueError: If there are no parameters, or the window is too short.

    Examples:
        >>> import torch
        >>> noise = NoiseScale({"w": torch.zeros(2)})
        >>> for step in range(4):
        ...     generator = torch.Generator().manual_seed(step)
        ...     for microbatch in range(2):
        ...         gradient = torch.ones(2) + torch.randn(2, generator=generator)
        ...         noise.add({"w": gradient}, weight=8)
        ...     closed = noise.close_step()  # before optimizer.step()
        >>> noise.steps
        4
    """

    def __init__(self, params: Mapping[str, Tensor], *, window: int | None = None) -> None:
        if not params:
            raise ValueError("NoiseScale got no parameters; expected those that training moves.")
        if window is not None and window < MIN_STEPS:
            raise ValueError(f"window is {window}; expected at least {MIN_STEPS} steps, or None.")
        dtype = reduce(torch.promote_types, (p.dtype for p in params.values()), torch.float32)
        self._flat, self._sum = _buffers(params, dtype)
        self._device = next(iter(params.values())).device
        self._rows: dict[Metric, deque[StepSums]] = {m: deque(maxlen=window) for m in METRICS}
        self._samples: deque[float] = deque(maxlen=window)
        self.skipped: int = 0
        self._begin()

    def _begin(self) -> None:
        for flat in self._flat:
            flat.zero_()
        self._preconditioner: Mapping[str, Tensor] | None = None
        self._weight = self._squared_weight = 0.0
        self._microbatches = 0
        self._merged, self._pieces = False, set[str]()
        self._open = torch.zeros(2, dtype=torch.float64, device=self._device)
        # sum b^2 |g|^2 and sum b |g|^2, raw and in the metric; on the device, so nothing waits.
        self._squares = torch.zeros(4, dtype=torch.float64, device=self._device)

    @property
    def steps(self) -> int:
        return len(self._rows["raw"])

    @property
    def adam_steps(self) -> int:
        """Steps that were closed in the Adam metric too: the first one has none."""
        return len(self._rows["adam"])

    def open_step(
        self, preconditioner: Mapping[str, Tensor] | None = None, *, merged: bool = False
    ) -> None:
        """Only needed for the Adam metric (the preconditioner as it is before the step), and for
        `merged`: all that this rank adds in pieces is one microbatch."""
        if self._microbatches or self._pieces:
            raise ValueError(
                f"A step with {self._microbatches} microbatches is open. Close it (close_step) or "
                "drop it (discard_step) before the next one."
            )
        if preconditioner is not None:
            _check_names("preconditioner", preconditioner, self._sum)
        self._preconditioner, self._merged = preconditioner, merged

    def add(self, gradient: Mapping[str, Tensor | None], weight: float = 1.0) -> None:
        """The *mean* gradient of a microbatch of `weight` samples; None is a gradient of 0."""
        _check_gradient(gradient, self._sum)
        weight = _checked_weight(weight)
        self._take(gradient, lambda g, total: g * weight, weight)

    def add_accumulated(
        self, gradient: Mapping[str, Tensor | None], weight: float = 1.0, *, scale: float = 1.0
    ) -> None:
        """The same from gradients that accumulate, as `.grad` does: all up to this microbatch.

        `scale` times the last of them is sum b_i g_i. So for a loss that is the microbatch's mean
        over the number of microbatches, scale is the number of samples of the whole step.
        """
        _check_gradient(gradient, self._sum)
        weight = _checked_weight(weight)
        if not (isfinite(scale) and scale > 0):
            raise ValueError(f"scale is {scale}; expected a positive number.")
        self._take(gradient, lambda g, total: g * scale - total, weight)

    def _take(
        self,
        gradient: Mapping[str, Tensor | None],
        part_of: Callable[[Tensor, Tensor], Tensor],
        weight: float,
    ) -> None:
        squares = torch.zeros(2, dtype=torch.float64, device=self._device)
        for name in self._sum:
            g = gradient[name]
            if g is not None:
                squares += self._take_one(name, g, part_of)
        self._count(squares, weight)

    def _take_one(
        self, name: str, g: Tensor, part_of: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """A chunk at a time, b g is made, added to S and forgotten; its squares in both metrics."""
        squares = torch.zeros(2, dtype=torch.float64, device=self._device)
        metric = None if self._preconditioner is None else self._preconditioner[name]
        for total_c, g_c, metric_c in _chunks(self._sum[name], g.detach(), metric):
            part = part_of(g_c.to(total_c.dtype), total_c)
            total_c.add_(part)
            squares[0] += _square(part).to(self._device)
            if metric_c is not None:
                squares[1] += _square(part, metric_c).to(self._device)
        return squares

    def _count(self, squares: Tensor, weight: float) -> None:
        raw, inside = squares
        self._squares += torch.stack([raw, raw / weight, inside, inside / weight])
        self._weight += weight
        self._squared_weight += weight**2
        self._microbatches += 1

    def add_piece(self, name: str, gradient: Tensor, *, scale: float = 1.0) -> None:
        """One parameter's gradient of the microbatch at hand, as a backward pass hands it over.

        `scale` times the sum of all pieces of a microbatch is b g. A microbatch ends with
        `end_microbatch`; its pieces of one parameter must come whole, unless the step is `merged`.
        """
        if name not in self._sum:
            raise ValueError(f"{name!r} is none of the parameters that NoiseScale was made with.")
        if gradient.shape != self._sum[name].shape:
            raise ValueError(
                f"gradient has shape {tuple(gradient.shape)} for {name!r}; expected "
                f"{tuple(self._sum[name].shape)}. It belongs to another model."
            )
        if name in self._pieces and not self._merged:
            raise ValueError(
                f"A backward pass gave {name!r} two gradients; expected one: the square of their "
                "sum is not the sum of their squares. Use gradient checkpointing that is not "
                "reentrant (use_reentrant=False)."
            )
        self._pieces.add(name)
        self._open += self._take_one(name, gradient, lambda g, total: g * scale)

    def end_microbatch(self, weight: float) -> None:
        """All pieces of a microbatch of `weight` samples were added; merged: all of the step."""
        weight = _checked_weight(weight)
        if self._merged:
            if self._microbatches:
                raise ValueError("A merged step has one microbatch on each rank; this is another.")
            # The passes' own squares lack what they have in common.
            wholes = self._wholes()
            self._open = torch.stack([wholes[0], wholes[-1] * (len(wholes) > 1)])
        self._count(self._open, weight)
        self._open, self._pieces = torch.zeros_like(self._open), set()

    def discard_step(self) -> None:
        """Forget the open step: one that the optimizer does not make."""
        self._begin()

    def close_step(self, group: Any = None, *, distributed: bool | None = None) -> bool:
        """Turn the step into two numbers; False: a gradient was not finite, the step is skipped.

        Several ranks (`group`, or torch.distributed where it is initialised) must all call this,
        also those without a microbatch. Call it before optimizer.step(): the metric is the
        optimizer's at that point.
        """
        totals = self._reduced(group, distributed)
        weight, squared, microbatches, with_metric, ranks = totals[:5].tolist()
        try:
            if with_metric not in (0, ranks):
                raise ValueError(
                    f"{with_metric:.0f} of {ranks:.0f} ranks opened the step with a "
                    "preconditioner; expected all or none."
                )
            if microbatches < 2:
                raise ValueError(
                    f"The step has {microbatches:.0f} microbatch(es); expected at least 2, since "
                    "noise is what differs between them. Accumulate over smaller microbatches."
                )
            if self._pieces:
                raise ValueError(
                    f"{len(self._pieces)} parameters have pieces of a microbatch that did not end. "
                    "Call end_microbatch before close_step."
                )
            whole = torch.stack(self._wholes()).tolist()
            squares = totals[5:].tolist()
        finally:
            self._begin()
        rows = [
            StepSums(
                signal=(s - squares[2 * i]) / (weight**2 - squared),
                noise=(squares[2 * i + 1] - s / weight) / (microbatches - 1),
            )
            for i, s in enumerate(whole)
        ]
        if not all(isfinite(value) for row in rows for value in row):
            self.skipped += 1
            return False
        for metric, row in zip(METRICS, rows):
            self._rows[metric].append(row)
        self._samples.append(weight)
        return True

    def _wholes(self) -> list[Tensor]:
        """|S|^2, and in the Adam metric where the step has one."""
        metrics = [None, *([] if self._preconditioner is None else [self._preconditioner])]
        return [self._whole(metric) for metric in metrics]

    def _whole(self, metric: Mapping[str, Tensor] | None) -> Tensor:
        whole = torch.zeros((), dtype=torch.float64, device=self._device)
        for name, total in self._sum.items():
            for total_c, metric_c in _chunks(total, None if metric is None else metric[name]):
                whole += _square(total_c, metric_c).to(self._device)
        return whole

    def _reduced(self, group: Any, distributed: bool | None) -> Tensor:
        """Sums over ranks: weights, squared weights, microbatches, ..., and S in its buffer."""
        counts = [self._weight, self._squared_weight, float(self._microbatches)]
        counts += [float(self._preconditioner is not None), 1.0]
        totals = torch.cat([self._squares.new_tensor(counts), self._squares])
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed if distributed is not None else (group is not None or several):
            for summed in (*self._flat, totals):
                torch.distributed.all_reduce(summed, group=group)
        return totals

    def estimate(self, metric: Metric = "raw") -> NoiseScaleEstimate:
        """Over the steps closed so far (or the last `window` of them)."""
        if metric not in METRICS:
            raise ValueError(f"metric is {metric!r}; expected one of {METRICS}.")
        rows = list(self._rows[metric])
        if not rows:
            raise ValueError(
                f"No step has been closed in the metric {metric!r} ({self.steps} raw, "
                f"{self.skipped} skipped). Call add for each microbatch, then close_step; the Adam "
                "metric needs open_step(adam_preconditioner(...)) too."
            )
        recent = list(self._samples)[-len(rows) :]
        return summarise_steps(
            rows, metric, skipped=self.skipped, samples=sum(recent) / len(recent)
        )


def _buffers(
    params: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """One flat buffer per device, so that ranks reduce once, and its views by name."""
    flats, views = [], {}
    for device in dict.fromkeys(p.device for p in params.values()):
        mine = {name: p for name, p in params.items() if p.device == device}
        sizes = [p.numel() for p in mine.values()]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        flats.append(flat)
        for (name, p), piece in zip(mine.items(), flat.split(sizes), strict=True):
            views[name] = piece.view(p.shape)
    return flats, {name: views[name] for name in params}


def _chunks(*tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Flat pieces of tensors of one shape, so that what is made of them stays small."""
    first = next(x for x in tensors if x is not None)
    flat = [None if x is None else x.expand(first.shape).reshape(-1) for x in tensors]
    for start in range(0, first.numel(), CHUNK):
        yield tuple(None if x is None else x[start : start + CHUNK] for x in flat)


def _square(x: Tensor, metric: Tensor | None = None) -> Tensor:
    """|x|^2 or x' P x, summed in fp64: the signal is a small difference of large sums."""
    if metric is None:
        return torch.linalg.vector_norm(x, dtype=torch.float64) ** 2
    return (metric.to(x.dtype) * x * x).sum(dtype=torch.float64)


def _check_names(what: str, got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    missing, unknown = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
    if missing or unknown:
        raise ValueError(
            f"{what} does not fit the parameters: missing {missing[:5]}, unknown {unknown[:5]}. "
            "Give the names that NoiseScale was made with; None for a parameter without gradient."
        )


def _check_gradient(gradient: Mapping[str, Tensor | None], expected: Mapping[str, Tensor]) -> None:
    """Before anything is added: a refused gradient leaves the step as it was."""
    _check_names("gradient", gradient, expected)
    for name, total in expected.items():
        g = gradient[name]
        if g is not None and g.shape != total.shape:
            raise ValueError(
                f"gradient has shape {tuple(g.shape)} for {name!r}; expected "
                f"{tuple(total.shape)}. It belongs to another model."
            )


def _checked_weight(weight: float) -> float:
    if not (isfinite(weight) and weight > 0):
        raise ValueError(
            f"weight is {weight}; expected the number of samples in the microbatch, above 0. Leave "
            "an empty microbatch out."
        )
    return float(weight)
