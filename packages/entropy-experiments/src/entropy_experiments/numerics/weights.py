"""Importance weights: how far rollouts of theta can speak for theta + eta v.

    ESS = (sum W)^2 / sum W^2        samples needed = exp KL(new || old)

Per decision there is a weight for every prefix. At each position the rollouts that are still being
written are asked, and the worst position that a tenth of all rollouts reach counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from entropy_experiments.numerics.sums import earlier
from entropy_experiments.types import Rollouts

K_HAT_MIN_ROLLOUTS = 100
K_HAT_ESS_FRACTION = 0.99
ESS_FLOOR = {"snis": 0.7, "per_decision": 0.2}
"""ESS/N below which intervals on the Markov policy stop covering (LOG.md). Per decision it is
the worst position's, and most tokens have better weights."""
REACHED = 0.1
LOG_MAX = 700.0


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightDiagnostics:
    rollouts: int
    ess: float
    ess_fraction: float
    ess_floor: float
    w_max: float
    """Largest and smallest weight relative to the mean weight."""
    w_min: float
    clip_fraction: float
    kl: float
    samples_needed: float
    k_hat: float | None
    """None where it says nothing: fewer than 100 rollouts, or ESS/N above 0.99."""
    k_hat_limit: float
    logweight_N: Tensor
    """Of whole responses, before any clipping."""

    @property
    def why_not(self) -> tuple[str, ...]:
        n, reasons = self.rollouts, []
        if self.ess_fraction < self.ess_floor:
            reasons.append(
                f"effective sample size {self.ess:.1f} of {n}: the step is too large to be "
                "measured with these rollouts"
            )
        if self.samples_needed > n:
            reasons.append(
                f"about exp(KL) = {self.samples_needed:.3g} rollouts are needed, {n} were given"
            )
        if self.k_hat is not None and self.k_hat > self.k_hat_limit:
            reasons.append(
                f"Pareto k-hat {self.k_hat:.2f} is above {self.k_hat_limit:.2f}: a few "
                "weights dominate"
            )
        if self.clip_fraction > 0:
            reasons.append(f"{self.clip_fraction:.1%} of the log-weights were clipped")
        return tuple(reasons)


def snis_logweights(logratio_NS: Tensor) -> Tensor:
    """One log-weight per rollout: the log-ratio of its whole response."""
    return logratio_NS.sum(1)


def per_decision_logweights(logratio_NS: Tensor) -> Tensor:
    """One log-weight per token: the log-ratio of what came strictly before it."""
    return earlier(logratio_NS)


def diagnose(
    logratio_NS: Tensor, rollouts: Rollouts, *, per_decision: bool, clip: float | None = None
) -> WeightDiagnostics:
    """Diagnostics of the weights that `snis` or `per_decision` uses for these log-ratios."""
    base_N, response_NS = rollouts.weight_N, rollouts.response_NS
    logratio_NS = torch.where(response_NS, logratio_NS, 0.0)
    total_N = snis_logweights(logratio_NS)
    # KL(new || old) = E_old[W log W]; subtracting W - 1, of mean 0, leaves no negative term.
    kl = float((base_N * (total_N.exp() * total_N - total_N.expm1())).sum())
    if per_decision:
        logweight_NK, alive_NK = _by_position(logratio_NS, response_NS)
        used = per_decision_logweights(logratio_NS)[response_NS]
    else:
        logweight_NK, used = total_N[:, None], total_N
        alive_NK = torch.ones_like(logweight_NK, dtype=torch.bool)
    clipped_NK = logweight_NK if clip is None else logweight_NK.clamp(-clip, clip)
    base_NK = torch.where(alive_NK, base_N[:, None], 0.0)
    share_NK = torch.softmax(clipped_NK + base_NK.log(), 0)
    # Relative to the base weights' own ESS, so that exact probabilities in tests give 1.
    fraction_K = (base_NK**2).sum(0) / base_NK.sum(0) ** 2 / (share_NK**2).sum(0)
    reached_K = alive_NK.sum(0) >= REACHED * len(base_N)
    worst = int(torch.where(reached_K, fraction_K, torch.inf).argmin())
    alive_N = alive_NK[:, worst]
    fraction, n = min(1.0, float(fraction_K[worst])), int(alive_N.sum())
    relative_N = (share_NK[:, worst] * base_NK[:, worst].sum())[alive_N] / base_N[alive_N]
    consulted = n >= K_HAT_MIN_ROLLOUTS and fraction < K_HAT_ESS_FRACTION
    return WeightDiagnostics(
        rollouts=len(base_N),
        ess=fraction * len(base_N),
        ess_fraction=fraction,
        ess_floor=ESS_FLOOR["per_decision" if per_decision else "snis"],
        w_max=float(relative_N.max()),
        w_min=float(relative_N.min()),
        clip_fraction=0.0 if clip is None else float((used.abs() > clip).double().mean()),
        kl=kl,
        samples_needed=math.exp(min(kl, LOG_MAX)),
        k_hat=pareto_k_hat(clipped_NK[alive_N, worst]) if consulted else None,
        k_hat_limit=min(1 - 1 / math.log10(max(n, 2)), 0.7),
        logweight_N=total_N,
    )


def pareto_k_hat(logweight_N: Tensor) -> float:
    """Shape of the weights' right tail, fitted by arviz-stats (which takes minus log-weights).

    Infinite where nothing can be fitted: all the weight is on a few rollouts.
    """
    from arviz_stats.base.array import array_stats  # a second, and most runs are too small to ask

    with np.errstate(divide="ignore", invalid="ignore"):
        _, k_hat = array_stats.psislw(-logweight_N.detach().cpu().double().numpy())
    return float(k_hat) if np.isfinite(k_hat) else math.inf


def _by_position(logratio_NS: Tensor, response_NS: Tensor) -> tuple[Tensor, Tensor]:
    """Prefix log-weights with column k for the k-th response token, and who has such a token."""
    order_NS = torch.argsort((~response_NS).to(torch.int8), dim=1, stable=True)
    width = int(response_NS.sum(1).max())
    order_NK = order_NS[:, :width]
    return per_decision_logweights(logratio_NS.gather(1, order_NK)), response_NS.gather(1, order_NK)
