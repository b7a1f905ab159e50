"""g_R, the gradient of expected reward: what one backward over E needs of the rewards.

The slope of the reward is linear in D S_i of every rollout (`estimate.reward`), so its coefficients

    matched     w_i (R_i - R) / sum w                    the derivative of the measured change
    by prompt   w_p (R_i - mean of the prompt)           where every prompt has two rollouts

are autograd on one small array, and each token of rollout i has the coefficient of its rollout.
"""

from __future__ import annotations

import torch

from entropy_experiments.estimate.reward import check_rewards, single_prompts
from entropy_experiments.estimate.reward_sums import covariances, level_of, matched, slope_of
from entropy_experiments.types import Rollouts, Scores


def reward_coefficients(
    reward_N: torch.Tensor | None, rollouts: Rollouts, *, within_prompts: bool | None = None
) -> Scores:
    """dR/dl_ik and dR/dh_ik (which is 0) at the policy that drew the rollouts.

    Args:
        reward_N: Of each evaluation rollout.
        rollouts: Drawn from the policy itself.
        within_prompts: Compare rollouts of one prompt only; None: where every prompt has two.

    Returns:
        Coefficients, zero outside the response.

    Raises:
        ValueError: If rewards are missing, or the rollouts are another policy's.
    """
    reward_N = check_rewards(reward_N, rollouts)
    if rollouts.behaviour_logprob_NS is not None:
        raise ValueError(
            "The evaluation rollouts have behaviour_logprob_NS; expected rollouts of the policy "
            "itself, whose reward gradient this is. Draw them from it."
        )
    if within_prompts is None:
        within_prompts = not single_prompts(rollouts)
    columns, statistic = (covariances, level_of) if within_prompts else (matched, slope_of)
    lowered_N, here_N = reward_N - reward_N.min(), torch.zeros_like(rollouts.weight_N)
    slope_N = torch.zeros_like(here_N, requires_grad=True)
    with torch.enable_grad():
        sums_NM = columns(lowered_N, here_N, slope_N, rollouts)
        value = statistic(*(rollouts.weight_N[:, None] * sums_NM).sum(0))
    (coefficient_N,) = torch.autograd.grad(value, slope_N)
    coefficient_NS = torch.where(rollouts.response_NS, coefficient_N[:, None], 0.0)
    return Scores(coefficient_NS, torch.zeros_like(coefficient_NS))
