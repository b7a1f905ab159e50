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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.online.adam_metric import adam_preconditioner
from entropy_experiments.online.noise_ratio import (
    METRICS,
    MIN_STEPS,
    Metric,
    NoiseScaleEstimate,
    StepSums,
    summarised,
)

__all__ = ["METRICS", "NoiseScale", "NoiseScaleEstimate", "adam_preconditioner"]

CHUNK = 2**22
"""Elements worked on at a time: temporaries stay far below the buffer."""


class NoiseScale:
    """Gradient noise scale and critical batch size, from the microbatch gradients of each step.

    It holds one buffer of the gradient's size.

    Args:
        params: Parameters that training moves, by name.
        window: How many of the last steps an estimate speaks of; None: all.

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
        return summarised(rows, metric, skipped=self.skipped, samples=sum(recent) / len(recent))


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
