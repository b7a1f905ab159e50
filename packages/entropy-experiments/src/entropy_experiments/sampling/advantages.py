"""Group-relative advantages, as TRL 1.16's GRPOTrainer computes them.

With r_i the weighted sum of the reward functions and g(i) the group of i (responses to one prompt):

    A_i = r_i - mean_g r                     scale "none"
    A_i = (r_i - mean_g r) / (std_g r + e)   scale "group"
    A_i = (r_i - mean_g r) / (std r + e)     scale "batch"     e = 1e-4

std has Bessel's correction and is 0 for a single value. A NaN reward means *no reward function had
an opinion*: it is left out of mean and std, and its own advantage is 0.
tests/online/test_trl_batches.py compares with the installed TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Literal, get_args

import torch
from torch import Tensor

Scale = Literal["group", "batch", "none"]
EPSILON = 1e-4


def group_advantages(reward_N: Tensor, group: int, scale: Scale = "group") -> Tensor:
    """Advantages of N = prompts * group rewards, those of one prompt side by side."""
    if scale not in get_args(Scale):
        raise ValueError(
            f"scale is {scale!r}; expected one of {get_args(Scale)} (TRL's scale_rewards)."
        )
    if reward_N.dim() != 1 or not reward_N.is_floating_point():
        raise ValueError(
            f"reward_N must be a 1-D floating point tensor; got {tuple(reward_N.shape)} of "
            f"{reward_N.dtype}."
        )
    if group < 1 or len(reward_N) % group:
        raise ValueError(
            f"{len(reward_N)} rewards do not divide into groups of {group}; expected every prompt "
            "to have the same number of responses."
        )
    _refuse_overflow(reward_N)
    reward_PG = reward_N.view(-1, group)
    centred_N = (reward_PG - reward_PG.nanmean(1, keepdim=True)).flatten()
    if scale == "none":
        advantage_N = centred_N
    elif scale == "group":
        std_P = _nanstd(reward_PG)
        advantage_N = centred_N / (std_P.repeat_interleave(group) + EPSILON)
    else:
        advantage_N = centred_N / (_nanstd(reward_N[None])[0] + EPSILON)
    return advantage_N.nan_to_num(nan=0.0)


def advantages_by_prompt(scale: Scale) -> Callable[[Tensor, Tensor], Tensor]:
    """The same rule for groups in any order and of any size, as where a rollout was left out."""

    def rule(reward_N: Tensor, prompt_N: Tensor) -> Tensor:
        out_N = torch.zeros_like(reward_N)
        own = "group" if scale == "group" else "none"
        for prompt in prompt_N.unique():
            rows = prompt_N == prompt
            out_N[rows] = group_advantages(reward_N[rows], int(rows.sum()), own)
        if scale == "batch":
            out_N = (out_N / (_nanstd(reward_N[None])[0] + EPSILON)).nan_to_num(nan=0.0)
        return out_N

    return rule


def weighted_rewards(reward_NF: Tensor, weights: Sequence[float]) -> Tensor:
    """[N] weighted sum over reward functions; NaN where not one of them gave a number."""
    if reward_NF.shape[1] != len(weights):
        raise ValueError(
            f"{len(weights)} weights for {reward_NF.shape[1]} reward functions; expected one each."
        )
    weight_F = torch.tensor(weights, dtype=reward_NF.dtype, device=reward_NF.device)
    total_N = (reward_NF * weight_F).nansum(1)
    return torch.where(reward_NF.isnan().all(1), torch.nan, total_N)


def _refuse_overflow(reward_N: Tensor) -> None:
    """Rewards whose squares are infinite would have no advantage, as equal ones have none."""
    limit = (torch.finfo(reward_N.dtype).max / max(1, len(reward_N))) ** 0.5
    largest = max((abs(reward) for reward in reward_N.tolist() if isfinite(reward)), default=0.0)
    if largest > limit:
        raise ValueError(
            f"Rewards of up to {largest:.3g} have a standard deviation beyond the range of "
            f"{str(reward_N.dtype).removeprefix('torch.')}; expected less than {limit:.1g}. Scale "
            "them down: advantages are relative to their group."
        )


def _nanstd(x_RN: Tensor) -> Tensor:
    """Of each row. A row of one is TRL's special case 0; one *scored* entry among many is NaN."""
    if x_RN.shape[1] == 1:
        return torch.zeros_like(x_RN[:, 0])
    # Integers divided by integers would be fp32, whatever the rewards are.
    count_R = (~x_RN.isnan()).sum(1).to(x_RN.dtype)
    variance_R = ((x_RN - x_RN.nanmean(1, keepdim=True)) ** 2).nanmean(1)
    correction_R = torch.where(count_R > 1, count_R / (count_R - 1), torch.nan)
    return (variance_R * correction_R).sqrt()
