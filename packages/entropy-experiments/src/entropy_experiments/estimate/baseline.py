"""A cross-fitted baseline for the state term.

a_ik = sum_{j>k} (h_ij - H) is mostly predictable from the prefix: how far along it is, how
uncertain the next token. Subtracting any function of the prefix leaves the expectation alone,
because a score has mean 0, provided the function was not fitted on the rollout itself: it is a
least-squares fit on the *other* folds of prompts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from entropy_experiments.numerics.sums import later
from entropy_experiments.types import Estimand, Rollouts, Scores

FOLDS = 5
RIDGE = 1e-8


def cross_fitted_baseline(base: Scores, rollouts: Rollouts, estimand: Estimand) -> Tensor:
    """Expected a_ik given the prefix, [N, S], zero outside the response."""
    if rollouts.behaviour_logprob_NS is not None:
        raise ValueError(
            "baseline=True with behaviour_logprob_NS: the baseline is defined for rollouts that "
            "the probed policy drew itself. Leave one of them out."
        )
    if estimand.entropy == "simple":
        raise ValueError("baseline=True needs entropy='rao_blackwell'; got 'simple'.")
    prompt_P, index_N = torch.unique(rollouts.prompt_N, return_inverse=True)
    if len(prompt_P) < 2:
        raise ValueError(
            "baseline=True needs at least 2 prompts, to fit on one what is subtracted from the "
            "other; got 1."
        )
    response_NS = rollouts.response_NS
    h_NS = torch.where(response_NS, base.entropy_NS, 0.0)
    one_NS = response_NS.to(h_NS.dtype)
    a_NS = later(h_NS)
    if estimand.unit == "token":
        weight_N = rollouts.weight_N[:, None]
        a_NS = a_NS - (weight_N * h_NS).sum() / (weight_N * one_NS).sum() * later(one_NS)

    position_NS = one_NS.cumsum(1) / one_NS.sum(1).max()
    features_NSF = torch.stack(
        [one_NS, position_NS, position_NS**2, h_NS, h_NS * position_NS], dim=-1
    )
    fold_N = index_N % min(FOLDS, len(prompt_P))
    expected_NS = torch.zeros_like(a_NS)
    for fold in fold_N.unique():
        inside_N = fold_N == fold
        others_NS = response_NS & ~inside_N[:, None]
        x_TF, y_T = features_NSF[others_NS], a_NS[others_NS]
        w_T = rollouts.weight_N[:, None].expand_as(a_NS)[others_NS]
        gram_FF = x_TF.mT @ (w_T[:, None] * x_TF)
        # The ridge decides only what the data leave open, such as position at a single length.
        gram_FF = gram_FF + RIDGE * gram_FF.diagonal().mean() * torch.eye(
            len(gram_FF), dtype=gram_FF.dtype, device=gram_FF.device
        )
        coefficient_F = torch.linalg.solve(gram_FF, x_TF.mT @ (w_T * y_T))
        mine_NS = response_NS & inside_N[:, None]
        expected_NS[mine_NS] = features_NSF[mine_NS] @ coefficient_F
    return expected_NS
