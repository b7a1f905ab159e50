"""The loss gradient g_L of a whole batch, in microbatches that each need one forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from entropy_experiments.numerics.derivatives import pullback
from entropy_experiments.numerics.sums import whole
from entropy_experiments.types import Params, Policy, Scores, UpdateBatch
from entropy_experiments.types.direction import check_finite
from entropy_experiments.update.objective import Objective


@dataclass(frozen=True, kw_only=True, eq=False)
class LossGradient:
    gradient: Params
    loss: float
    scores: Scores
    """Of the update rollouts, from the same forwards."""
    microbatches: int


def loss_gradient(
    policy: Policy, batch: UpdateBatch, objective: Objective, *, microbatch: int = 8
) -> LossGradient:
    """g_L, exact whatever the microbatch: normalisers are those of the whole batch."""
    whole(batch.rollouts)
    weights = objective.token_weights(batch)
    total: dict[str, Tensor] = {}
    shape, loss, count = batch.rollouts.tokens_NS.shape, 0.0, 0
    logprob_NS, entropy_NS = (
        torch.zeros(shape, dtype=torch.float64, device=batch.rollouts.tokens_NS.device)
        for _ in range(2)
    )
    for rows_N, columns, _ in batch.rollouts.split(microbatch):
        part, part_weights = batch.take(rows_N, columns), weights.take(rows_N, columns)

        def part_loss(
            params: Params,
            part: UpdateBatch = part,
            part_weights=part_weights,
            rows_N: Tensor = rows_N,
            columns: slice = columns,
        ) -> Tensor:
            scores = policy.score(params, part.rollouts)
            logprob_NS[rows_N, columns] = scores.logprob_NS.detach().double()
            entropy_NS[rows_N, columns] = scores.entropy_NS.detach().double()
            return objective.weighted(scores, part, part_weights)

        value, grads = pullback(part_loss, policy.params)
        for name, grad in grads.items():
            total[name] = grad if name not in total else total[name] + grad
        loss, count = loss + float(value), count + 1
    check_finite("loss gradient", total)
    return LossGradient(
        gradient=total, loss=loss, scores=Scores(logprob_NS, entropy_NS), microbatches=count
    )


def clip_factor(gradient: Params, max_grad_norm: float | None) -> tuple[float, float]:
    """(factor, global norm) as `torch.nn.utils.clip_grad_norm_` computes them; 0 or None is off."""
    norm = float(sum((g.double() ** 2).sum() for g in gradient.values())) ** 0.5
    if not max_grad_norm:
        return 1.0, norm
    return min(1.0, max_grad_norm / (norm + 1e-6)), norm
