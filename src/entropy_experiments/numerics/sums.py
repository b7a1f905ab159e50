"""Sums over positions, and error bars for smooth functions of weighted means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from entropy_experiments.types import Estimand, Estimate, Influence, Rollouts
from entropy_experiments.types.rollouts import WEIGHT_TOLERANCE

Statistic = Callable[..., Tensor]
"""A smooth function of M means, written elementwise: it must accept tensors of any one shape."""


def later(x_NS: Tensor) -> Tensor:
    """Sum over the positions strictly after each one."""
    return pad(x_NS.flip(1).cumsum(1).flip(1)[:, 1:], (0, 1))


def earlier(x_NS: Tensor) -> Tensor:
    """Sum over the positions strictly before each one."""
    return pad(x_NS.cumsum(1)[:, :-1], (1, 0))


def by_prompt(
    statistic: Statistic,
    sums_NM: Tensor,
    rollouts: Rollouts,
    estimand: Estimand,
    *,
    noise_floor: float | None = None,
    diagnostics: Mapping[str, Any] | None = None,
    why_not: Iterable[str] = (),
) -> Estimate:
    """`statistic` of the weighted means of `sums_NM`, with a jackknife over prompts.

    For a fixed set of prompts the jackknife leaves out one rollout of a prompt at a time and keeps
    the prompt's weight, so that only the spread within prompts counts.
    """
    whole(rollouts)
    plug_in, influence = jackknife(statistic, sums_NM, rollouts, estimand)
    return Estimate.build(
        plug_in=plug_in,
        estimand=estimand,
        influences=(influence,),
        noise_floor=noise_floor,
        diagnostics=diagnostics,
        why_not=(*why_not, *tail_check(influence)),
    )


def jackknife(
    statistic: Statistic, sums_NM: Tensor, rollouts: Rollouts, estimand: Estimand
) -> tuple[float, Influence]:
    """Plug-in value and influence values; see `types.estimate` for the formula."""
    weight_C, mean_CM, prompt_C, stratum_C = _units(sums_NM, rollouts, estimand)
    mean_M = (weight_C[:, None] * mean_CM).sum(0)
    plug_in = statistic(*mean_M)

    _, index_C = torch.unique(stratum_C, return_inverse=True)
    zeros = torch.zeros(int(index_C.max()) + 1, dtype=weight_C.dtype, device=weight_C.device)
    stratum_weight_C = zeros.index_add(0, index_C, weight_C)[index_C]
    stratum_mean_CM = (
        zeros[:, None]
        .expand(-1, mean_CM.shape[1])
        .index_add(0, index_C, weight_C[:, None] * mean_CM)[index_C]
        / stratum_weight_C[:, None]
    )
    # A stratum with one unit has no leave-one-out; its influence is 0 and `Influence.variance`
    # refuses to speak.
    alone_C = weight_C >= stratum_weight_C
    odds_C = torch.where(alone_C, 0.0, weight_C / (stratum_weight_C - weight_C))
    shift_CM = (stratum_weight_C * odds_C)[:, None] * (mean_CM - stratum_mean_CM)
    without_C = statistic(*(mean_M - shift_CM).unbind(1))
    value_C = (1 - weight_C / stratum_weight_C) * (plug_in - without_C)
    influence = Influence(
        value_C=value_C,
        prompt_C=prompt_C,
        stratum_C=stratum_C,
        sample=rollouts.fingerprint,
        drawn=bool((rollouts.weight_N == rollouts.weight_N[0]).all()),
    )
    return float(plug_in), influence


def bootstrap(
    statistic: Statistic,
    sums_NM: Tensor,
    rollouts: Rollouts,
    estimand: Estimand,
    *,
    replicates: int = 1000,
    generator: torch.Generator,
) -> Tensor:
    """Values of the statistic on resampled prompts (fixed set: resampled rollouts of each)."""
    weight_C, mean_CM, _, stratum_C = _units(sums_NM, rollouts, estimand)
    total = torch.zeros(replicates, mean_CM.shape[1], dtype=mean_CM.dtype)
    mass = torch.zeros(replicates, dtype=mean_CM.dtype)
    for stratum in stratum_C.unique():
        rows = (stratum_C == stratum).nonzero().squeeze(1).cpu()
        n = len(rows)
        drawn = torch.randint(n, (replicates, n), generator=generator)
        picked_w = weight_C.cpu()[rows][drawn]
        picked_x = mean_CM.cpu()[rows][drawn]
        # Each stratum keeps its weight, whatever was drawn in it.
        scale = weight_C.cpu()[rows].sum() / picked_w.sum(1)
        total += scale[:, None] * (picked_w[:, :, None] * picked_x).sum(1)
        mass += scale * picked_w.sum(1)
    return statistic(*(total / mass[:, None]).unbind(1))


def percentile_interval(values: Tensor, confidence: float = 0.95) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = torch.quantile(values, torch.tensor([tail, 1 - tail], dtype=values.dtype)).tolist()
    return low, high


def tail_check(influence: Influence, *, units: int = 20, share: float = 0.5) -> tuple[str, ...]:
    """A first-order number has no weights to inspect; one unit carrying it all is its warning."""
    squares_C = influence.value_C**2
    total = float(squares_C.sum())
    if len(squares_C) < units or total == 0:
        return ()
    worst = int(squares_C.argmax())
    fraction = float(squares_C[worst]) / total
    if fraction <= share:
        return ()
    return (
        f"prompt {int(influence.prompt_C[worst])} alone carries {fraction:.0%} of the squared "
        "influence: the error bar rests on one prompt",
    )


def whole(rollouts: Rollouts) -> None:
    if abs(rollouts.share - 1.0) > WEIGHT_TOLERANCE:
        raise ValueError(
            f"These rollouts are a part of a batch (weight {rollouts.share:.6g}); expected the "
            "whole, whose weights sum to one. Add the parts' sums first."
        )


def _units(
    sums_NM: Tensor, rollouts: Rollouts, estimand: Estimand
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the jackknife leaves out: prompts of one stratum, or rollouts within prompts."""
    weight_N, prompt_N = rollouts.weight_N, rollouts.prompt_N
    if estimand.prompts == "fixed":
        return weight_N, sums_NM, prompt_N, prompt_N
    prompt_P, index_N = torch.unique(prompt_N, return_inverse=True)
    weight_P = torch.zeros(len(prompt_P), dtype=weight_N.dtype, device=weight_N.device)
    weight_P = weight_P.index_add(0, index_N, weight_N)
    total_PM = torch.zeros(len(prompt_P), sums_NM.shape[1], dtype=sums_NM.dtype).to(sums_NM.device)
    total_PM = total_PM.index_add(0, index_N, weight_N[:, None] * sums_NM)
    empty_P = weight_P == 0
    mean_PM = total_PM / torch.where(empty_P, 1.0, weight_P)[:, None]
    return weight_P, mean_PM, prompt_P, torch.zeros_like(prompt_P)
