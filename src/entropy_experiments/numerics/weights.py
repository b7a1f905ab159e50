"""Importance weights: how far rollouts of theta can speak for theta + eta v.

    ESS = (sum W)^2 / sum W^2        samples needed = exp KL(new || old)

Per decision there is a weight for every prefix, and the worst position counts. A rollout that has
ended keeps its weight: the question is what share of the *sample* still speaks at each length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from arviz_stats.base.array import array_stats
from torch import Tensor

from entropy_experiments.numerics.sums import earlier
from entropy_experiments.types import Rollouts

K_HAT_MIN_ROLLOUTS = 100
K_HAT_ESS_FRACTION = 0.99
ESS_FRACTION_MIN = 0.1
LOG_MAX = 700.0


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightDiagnostics:
    ess: float
    ess_fraction: float
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
    """The weights actually used (per decision: at the worst position), before any clipping."""

    @property
    def why_not(self) -> tuple[str, ...]:
        n, reasons = len(self.logweight_N), []
        if self.ess_fraction < ESS_FRACTION_MIN:
            reasons.append(
                f"effective sample size {self.ess:.1f} of {n}: the step is too large for these "
                "rollouts to speak for it"
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
    base_N = rollouts.weight_N
    total_N = snis_logweights(logratio_NS)
    # KL(new || old) = E_old[W log W]; subtracting W - 1, of mean 0, leaves no negative term.
    kl = float((base_N * (total_N.exp() * total_N - total_N.expm1())).sum())
    if per_decision:
        compact_NS = _left_justified(logratio_NS, rollouts.response_NS)
        candidates_NS = per_decision_logweights(compact_NS)
        clipped = _clip_fraction(per_decision_logweights(logratio_NS)[rollouts.response_NS], clip)
    else:
        candidates_NS = total_N[:, None]
        clipped = _clip_fraction(total_N, clip)
    used_NS = candidates_NS if clip is None else candidates_NS.clamp(-clip, clip)
    share_NS = torch.softmax(used_NS + base_N.log()[:, None], 0)
    uniformity = float((base_N**2).sum())
    # Relative to the base weights' own ESS, so that exact probabilities in tests give fraction 1.
    fraction_S = uniformity / (share_NS**2).sum(0)
    worst = int(fraction_S.argmin())
    fraction, n = min(1.0, float(fraction_S[worst])), len(base_N)
    relative_N = share_NS[:, worst] / base_N.clamp_min(torch.finfo(base_N.dtype).tiny)
    consulted = n >= K_HAT_MIN_ROLLOUTS and fraction < K_HAT_ESS_FRACTION
    return WeightDiagnostics(
        ess=fraction * n,
        ess_fraction=fraction,
        w_max=float(relative_N.max()),
        w_min=float(relative_N.min()),
        clip_fraction=clipped,
        kl=kl,
        samples_needed=math.exp(min(kl, LOG_MAX)),
        k_hat=pareto_k_hat(used_NS[:, worst]) if consulted else None,
        k_hat_limit=min(1 - 1 / math.log10(max(n, 2)), 0.7),
        logweight_N=candidates_NS[:, worst],
    )


def pareto_k_hat(logweight_N: Tensor) -> float:
    """Shape of the weights' right tail, fitted by arviz-stats (which takes minus log-weights).

    Infinite where nothing can be fitted: all the weight is on a few rollouts.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        _, k_hat = array_stats.psislw(-logweight_N.detach().cpu().double().numpy())
    return float(k_hat) if np.isfinite(k_hat) else math.inf


def _clip_fraction(logweight: Tensor, clip: float | None) -> float:
    return 0.0 if clip is None else float((logweight.abs() > clip).double().mean())


def _left_justified(x_NS: Tensor, response_NS: Tensor) -> Tensor:
    """Response entries moved to the front of their row, zeros behind: column k is token k."""
    order_NS = torch.argsort((~response_NS).to(torch.int8), dim=1, stable=True)
    compact_NS = torch.where(response_NS, x_NS, 0.0).gather(1, order_NS)
    # One column more, so that the last token's own ratio is in the final prefix weight.
    width = int(response_NS.sum(1).max()) + 1
    return torch.nn.functional.pad(compact_NS, (0, 1))[:, :width]
