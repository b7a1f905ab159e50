"""The step that would have been made without one rollout: nothing frozen.

A rollout's influence keeps the rest of the step as it was. Leaving it out changes more: its
group-mates' advantages (their mean and spread lose a reward), the loss's normaliser (1/N becomes
1/(N-1), token counts shrink), the clip factor (another gradient norm) and Adam's denominator
(another squared gradient). All four are made again here, and the result says so: `label`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from entropy_experiments.numerics.sums import whole
from entropy_experiments.types import Direction, OptimizerState, Policy, UpdateBatch
from entropy_experiments.update.adamw import adamw_direction
from entropy_experiments.update.gradient import loss_gradient
from entropy_experiments.update.objective import Objective

AdvantageRule = Callable[[Tensor, Tensor], Tensor]
"""(reward_N, prompt_N) -> advantage_N, for groups of any size."""

SAME_ADVANTAGE = 1e-3
"""Relative to 1 + |advantage|: above fp32 rounding of a standardised reward, below other rules."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LeftOut:
    """A step rebuilt without one rollout."""

    row: int
    direction: Direction
    batch: UpdateBatch
    """What the step was made of: the other rollouts with their new advantages."""
    label: str = "leave_one_out"


def leave_one_out(
    trained: Policy,
    batch: UpdateBatch,
    objective: Objective,
    optimizer: OptimizerState,
    row: int,
    *,
    advantage_of: AdvantageRule,
    max_grad_norm: float | None = None,
    microbatch: int = 8,
) -> LeftOut:
    """The whole AdamW step again, of a batch that never had rollout `row`.

    `advantage_of` is the rule that made the batch's advantages; that it gives them again is
    checked before it is trusted with the smaller group.
    """
    rest = without(batch, row, advantage_of)
    found = loss_gradient(trained, rest, objective, microbatch=microbatch)
    direction = adamw_direction(
        trained.params, found.gradient, optimizer, max_grad_norm=max_grad_norm
    )
    return LeftOut(row=row, direction=direction, batch=rest)


def without(batch: UpdateBatch, row: int, advantage_of: AdvantageRule) -> UpdateBatch:
    """The batch without one rollout: weights sum to one again, advantages made anew."""
    rollouts, count = batch.rollouts, len(batch.rollouts)
    whole(rollouts)
    if not 0 <= row < count or count < 2:
        raise ValueError(
            f"Rollout {row} of {count} cannot be left out; expected one of 0 to {count - 1} in a "
            "batch of two or more."
        )
    if batch.reward_N is None:
        raise ValueError(
            "The batch has no reward_N, from which the advantages of the group would be made "
            "again; expected rewards. Record them, or use the influence, which freezes advantages."
        )
    _check_rule(batch, batch.reward_N, advantage_of)
    rows_N = torch.tensor([i for i in range(count) if i != row], device=rollouts.tokens_NS.device)
    rest = batch.take(rows_N, slice(None))
    assert rest.reward_N is not None
    weight_N = rest.rollouts.weight_N / rest.rollouts.weight_N.sum()
    advantage_N = advantage_of(rest.reward_N, rest.rollouts.prompt_N).to(batch.advantage_NS)
    return replace(
        rest,
        rollouts=replace(rest.rollouts, weight_N=weight_N, share=1.0),
        advantage_NS=advantage_N[:, None].expand_as(rest.advantage_NS).contiguous(),
    )


def _check_rule(batch: UpdateBatch, reward_N: Tensor, advantage_of: AdvantageRule) -> None:
    advantage_N = advantage_of(reward_N, batch.rollouts.prompt_N)
    if advantage_N.shape != reward_N.shape:
        raise ValueError(
            f"advantage_of gave shape {tuple(advantage_N.shape)} for {len(reward_N)} rewards; "
            "expected one advantage per rollout."
        )
    counted_NS = batch.counted_NS
    gap_NS = (advantage_N[:, None].to(batch.advantage_NS) - batch.advantage_NS).abs()
    off_NS = counted_NS & ~(gap_NS <= SAME_ADVANTAGE * (1 + batch.advantage_NS.abs()))
    if off_NS.any():
        n, s = (int(i) for i in off_NS.nonzero()[0])
        raise ValueError(
            f"advantage_of gives {float(advantage_N[n]):.6g} for rollout {n}, where the batch has "
            f"{float(batch.advantage_NS[n, s]):.6g} (position {s}). Expected the rule that made "
            "the batch: check how rewards are scaled, and that advantages are one per rollout."
        )
