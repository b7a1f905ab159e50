"""Sums over positions, and error bars for smooth functions of weighted means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from entropy_experiments.types import Estimand, Estimate, Influence, Rollouts
from entropy_experiments.types.estimate import MIN_PROMPTS
from entropy_experiments.types.rollouts import WEIGHT_TOLERANCE

Statistic = Callable[..., Tensor]
"""A smooth function of M means, written elementwise: it must accept tensors of any one shape."""

TAIL_UNITS = 20
TAIL_FREEDOM = 3.0
"""Fewer effective degrees of freedom than this among 20 or more units: one unit is the estimate."""


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
    check_tail: bool = False,
) -> Estimate:
    """`statistic` of the weighted means of `sums_NM`, with a jackknife over prompts.

    For a fixed set of prompts the jackknife leaves out one rollout of a prompt at a time and keeps
    the prompt's weight, so that only the spread within prompts counts.
    """
    whole(rollouts)
    value, influence = jackknife(statistic, sums_NM, rollouts, estimand)
    return Estimate.build(
        value=value,
        estimand=estimand,
        influences=(influence,),
        noise_floor=noise_floor,
        diagnostics=diagnostics,
        why_not=(
            *why_not,
            *few_by_weight(rollouts, estimand),
            *(tail_check(influence) if check_tail else ()),
        ),
    )


def point(statistic: Statistic, sums_NM: Tensor, rollouts: Rollouts) -> float:
    """`statistic` of the weighted means, without an error bar."""
    return float(statistic(*(rollouts.weight_N[:, None] * sums_NM).sum(0)))


def jackknife(
    statistic: Statistic, sums_NM: Tensor, rollouts: Rollouts, estimand: Estimand
) -> tuple[float, Influence]:
    """The statistic and its influence values; see `types.estimate` for the formula."""
    weight_C, mean_CM, prompt_C, stratum_C = _units(sums_NM, rollouts, estimand)
    mean_M = (weight_C[:, None] * mean_CM).sum(0)
    value = statistic(*mean_M)

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
    value_C = (1 - weight_C / stratum_weight_C) * (value - without_C)
    influence = Influence(
        value_C=value_C,
        prompt_C=prompt_C,
        stratum_C=stratum_C,
        sample=rollouts.fingerprint,
    )
    return float(value), influence


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
    weight_C, mean_CM, _, stratum_C = (x.cpu() for x in _units(sums_NM, rollouts, estimand))
    total = torch.zeros(replicates, mean_CM.shape[1], dtype=mean_CM.dtype)
    for stratum in stratum_C.unique():
        rows = stratum_C == stratum
        w, x, n = weight_C[rows], mean_CM[rows], int(rows.sum())
        centre = (w[:, None] * x).sum(0) / w.sum()
        drawn = torch.randint(n, (replicates, n), generator=generator)
        picked = (w[drawn][:, :, None] * x[drawn]).sum(1) / w[drawn].sum(1)[:, None]
        # Drawing n of n with replacement has (n - 1) / n of the variance; and each stratum keeps
        # its weight, whatever was drawn in it.
        stretch = (n / (n - 1)) ** 0.5 if n > 1 else 1.0
        total += w.sum() * (centre + stretch * (picked - centre))
    return statistic(*total.unbind(1))


def percentile_interval(values: Tensor, confidence: float = 0.95) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = torch.quantile(values, torch.tensor([tail, 1 - tail], dtype=values.dtype)).tolist()
    return low, high


def tail_check(influence: Influence) -> tuple[str, ...]:
    """A first-order number has no weights to inspect; one unit carrying it all is its warning."""
    variance = influence.variance()
    if variance is None or len(influence.value_C) < TAIL_UNITS or variance[1] >= TAIL_FREEDOM:
        return ()
    worst = int((influence.value_C**2).argmax())
    share = float(influence.value_C[worst] ** 2 / (influence.value_C**2).sum())
    return (
        f"prompt {int(influence.prompt_C[worst])} carries {share:.0%} of the squared influence: "
        "the error bar rests on it alone",
    )


def few_by_weight(rollouts: Rollouts, estimand: Estimand) -> tuple[str, ...]:
    """Weights may leave fewer prompts than there are: n = (sum w)^2 / sum w^2 of them count."""
    if estimand.prompts != "population":
        return ()
    prompt_P, index_N = torch.unique(rollouts.prompt_N, return_inverse=True)
    weight_P = torch.zeros(len(prompt_P), dtype=rollouts.weight_N.dtype)
    weight_P = weight_P.to(rollouts.weight_N.device).index_add(0, index_N, rollouts.weight_N)
    effective = float(weight_P.sum() ** 2 / (weight_P**2).sum())
    # Groups of unequal size are no reason for doubt: five prompts of which one was cut are five.
    if len(prompt_P) < MIN_PROMPTS or round(effective) >= MIN_PROMPTS:
        return ()
    return (
        f"the weights of {len(prompt_P)} prompts leave {effective:.1f} that count: an interval for "
        f"a population needs at least {MIN_PROMPTS}",
    )


def whole(rollouts: Rollouts) -> None:
    if not isinstance(rollouts, Rollouts):
        raise TypeError(
            f"Got a {type(rollouts).__name__} as rollouts; expected Rollouts (an UpdateBatch has "
            "them as `.rollouts`)."
        )
    if abs(rollouts.share - 1.0) > WEIGHT_TOLERANCE:
        raise ValueError(
            f"These rollouts are a part of a batch (weight {rollouts.share:.6g}); expected the "
            "whole, whose weights sum to one. To make a batch of a part, replace(part, "
            "weight_N=None, share=1.0)."
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
