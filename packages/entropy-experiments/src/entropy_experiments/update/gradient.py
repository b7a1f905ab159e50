"""The loss gradient g_L of a whole batch, in microbatches that each need one forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.distributed import current
from entropy_experiments.numerics.derivatives import norm, pullback_sum, require_full_precision
from entropy_experiments.numerics.sums import whole
from entropy_experiments.types import Params, Policy, Rollouts, Scores, UpdateBatch
from entropy_experiments.types.direction import check_finite
from entropy_experiments.types.rollouts import check_logprobs
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
    """g_L as training takes it, whatever the microbatch: normalisers are of the whole batch.

    Args:
        policy: The policy as training sees it.
        batch: What the step learns from.
        objective: The loss.
        microbatch: Rollouts in a pass; no number depends on it.

    Returns:
        The gradient by parameter, the loss, and the update rollouts' scores from the same passes.

    Raises:
        TypeError: If `batch` has no advantages.
        ValueError: If the gradient is not finite, or parameters are below fp32.

    Examples:
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> gradient = loss_gradient(policy, policy.update_batch(seed=1), Objective()).gradient
        >>> gradient["table"].shape
        torch.Size([5, 5])
    """
    if not isinstance(batch, UpdateBatch):
        raise TypeError(
            f"Got {type(batch).__name__} as update batch; expected an UpdateBatch, which has "
            "advantages beside its rollouts."
        )
    whole(batch.rollouts)
    for name in ("old_logprob_NS", "ref_logprob_NS"):
        check_logprobs(name, getattr(batch, name), batch.rollouts.response_NS)
    policy = as_trained(policy)
    require_full_precision(policy.params)
    weights = objective.token_weights(batch)
    scores = Scores(
        *(torch.zeros_like(batch.rollouts.response_NS, dtype=torch.float64) for _ in range(2))
    )

    def loss_of(rows_N: Tensor, columns: slice, rollouts: Rollouts) -> Callable[[Params], Tensor]:
        if not len(rows_N):  # an idle part: a pass whose gradient is zero
            return lambda params: 0.0 * policy.score(params, rollouts).logprob_NS.sum()
        part, part_weights = batch.take(rows_N, columns), weights.take(rows_N, columns)

        def loss(params: Params) -> Tensor:
            found = policy.score(params, part.rollouts)
            for whole_NS, part_NS in zip(scores, found, strict=True):
                whole_NS[rows_N, columns] = part_NS.detach().double()
            return objective.weighted(found, part, part_weights)

        return loss

    split = batch.rollouts.split(microbatch, policy)
    loss, gradient, _ = pullback_sum((loss_of(*part) for part in split), policy.params)
    # Each rank has the scores of its own microbatches.
    everyones = Scores(*current().all_reduce(lambda: scores))
    check_finite("loss gradient", gradient)
    count = ceil(len(batch.rollouts) / microbatch)
    return LossGradient(gradient=gradient, loss=loss, scores=everyones, microbatches=count)


def as_trained(policy: Policy) -> Policy:
    """The policy with training's own gradient, where that is not the derivative of its scores."""
    other: Any = getattr(policy, "as_trained", None)
    return policy if other is None else other()


def clip_factor(gradient: Params, max_grad_norm: float | None) -> tuple[float, float]:
    """(factor, global norm) as `torch.nn.utils.clip_grad_norm_` computes them; 0 or None is off."""
    if max_grad_norm is not None and not max_grad_norm >= 0:
        raise ValueError(
            f"max_grad_norm is {max_grad_norm}; expected a number above 0, or None or 0 for no "
            "clipping: a negative one would turn the gradient round."
        )
    size = norm(gradient)
    if not max_grad_norm:
        return 1.0, size
    return min(1.0, max_grad_norm / (size + 1e-6)), size
