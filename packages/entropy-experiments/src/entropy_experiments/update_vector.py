"""Document 004's `update_vector`; the home is `update.adamw`.

Here, the step may also be had rollout by rollout: v_i = -P c g_i, with g_i the share of rollout i
in the loss gradient. They add up to the gradient part of the direction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.estimate.gradient import weighted_gradient
from entropy_experiments.types import (
    Direction,
    OptimizerState,
    Policy,
    Scores,
    UpdateBatch,
)
from entropy_experiments.update import adamw
from entropy_experiments.update.adamw import UpdateStats
from entropy_experiments.update.gradient import as_trained
from entropy_experiments.update.objective import Objective, token_coefficients

__all__ = ["UpdateStats", "compute_update_vector_adamw"]

SequenceCallback = Callable[[int, Direction, dict[str, Any]], object]


def compute_update_vector_adamw(
    policy: Policy,
    batch: UpdateBatch,
    objective: Objective,
    optimizer: OptimizerState,
    *,
    max_grad_norm: float | None = None,
    microbatch: int = 8,
    sequence_callback: SequenceCallback | None = None,
) -> tuple[Direction, Direction, UpdateStats]:
    """(direction, baseline, stats) of the step that `batch` would make.

    `sequence_callback(i, direction_i, facts)` is called for every rollout of the batch, in order:
    its own share of the step, its prompt and its share's norm. Each costs one backward pass.
    """
    direction, baseline, stats = adamw.compute_update_vector_adamw(
        policy, batch, objective, optimizer, max_grad_norm=max_grad_norm, microbatch=microbatch
    )
    if sequence_callback is not None:
        coefficients = token_coefficients(objective, stats.found.scores, batch)
        for i in range(len(batch.rollouts)):
            own = _share(as_trained(policy), batch, coefficients, direction, i)
            size = sum(float(v.double().square().sum()) for v in own.gradient.values()) ** 0.5
            facts = {"prompt": int(batch.rollouts.prompt_N[i]), "norm": size}
            sequence_callback(i, own, facts)
    return direction, baseline, stats


def _share(
    policy: Policy, batch: UpdateBatch, coefficients: Scores, direction: Direction, row: int
) -> Direction:
    """v_i; the preconditioner is the whole step's, as Adam's denominator is."""
    rows_N = torch.tensor([row], device=batch.rollouts.tokens_NS.device)
    own = Scores(*(x_NS[rows_N] for x_NS in coefficients))
    gradient = weighted_gradient(policy, batch.rollouts.take(rows_N), own, microbatch=1)
    assert direction.preconditioner is not None  # adamw_direction always gives one
    factor = direction.clip_factor
    moved: dict[str, Tensor] = {
        name: (-factor * direction.preconditioner[name].double() * g.double()).to(
            direction.gradient[name].dtype
        )
        for name, g in gradient.items()
    }
    return Direction(
        parts={"gradient": moved},
        lr=direction.lr,
        preconditioner=direction.preconditioner,
        clip_factor=factor,
    )
