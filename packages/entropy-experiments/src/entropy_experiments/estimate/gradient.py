"""g_H, the gradient of entropy: one backward over E that serves every direction.

H is a function of the scores (l, h) alone, so its token coefficients dH/dl_ik and dH/dh_ik come
from autograd on two small arrays; for the to-go form they are w_i a_ik and w_i over sum w T. The
gradient is then that of a plain weighted sum of scores, microbatch by microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from entropy_experiments.estimate.ratio import drawn_with, payload, ratio_sums, score_all
from entropy_experiments.numerics.derivatives import pullback_sum
from entropy_experiments.types import Estimand, Params, Policy, Rollouts, Scores

Term = Literal["total", "direct", "state"]


def entropy_gradient(
    policy: Policy,
    rollouts: Rollouts,
    *,
    estimand: Estimand,
    term: Term = "total",
    microbatch: int = 8,
    base: Scores | None = None,
) -> Params:
    """g_H: its dot product with any direction is the slope along it.

    Args:
        policy: Parameters at which the gradient is taken.
        rollouts: Drawn from this policy.
        estimand: Which entropy is meant.
        term: The "total", or only the "direct" or the "state" term.
        microbatch: Rollouts in a pass.
        base: Scores at theta, if they are there already.

    Returns:
        The gradient by parameter.

    Examples:
        >>> import torch
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> rollouts = policy.draw(seed=2)
        >>> direction = Direction(parts={"gradient": {"table": torch.eye(5).double()}}, lr=0.1)
        >>> g_H = entropy_gradient(policy, rollouts, estimand=Estimand())
        >>> along = float((g_H["table"] * direction.total["table"]).sum())
        >>> slope = first_order(policy, rollouts, direction)
        >>> abs(along - slope.value) < 1e-12
        True
    """
    base = base or score_all(policy, policy.params, rollouts, microbatch=microbatch)
    cotangent = entropy_coefficients(base, rollouts, estimand, term=term)

    return weighted_gradient(policy, rollouts, cotangent, microbatch=microbatch)


def weighted_gradient(
    policy: Policy, rollouts: Rollouts, cotangent: Scores, *, microbatch: int
) -> dict[str, Tensor]:
    """Gradient of sum_ik (c_l l + c_h h), microbatch by microbatch."""

    def weighted_scores(
        rows_N: Tensor, columns: slice, part: Rollouts
    ) -> Callable[[Params], Tensor]:
        def value(params: Params) -> Tensor:
            products = (
                cotangent_NS[rows_N, columns].to(x_NS.dtype) * x_NS
                for cotangent_NS, x_NS in zip(cotangent, policy.score(params, part), strict=True)
            )
            return torch.where(part.response_NS, sum(products), 0.0).sum()

        return value

    parts = (weighted_scores(*part) for part in rollouts.split(microbatch, policy))
    return pullback_sum(parts, policy.params)[1]


def entropy_coefficients(
    base: Scores, rollouts: Rollouts, estimand: Estimand, *, term: Term = "total"
) -> Scores:
    """dH/dl_ik and dH/dh_ik at the probed policy."""
    leaves = Scores(*(x_NS.detach().requires_grad_() for x_NS in base))
    with torch.enable_grad():
        paid_NS = payload(leaves, estimand)
        moved_NS = leaves.logprob_NS - drawn_with(base, rollouts)
        if term == "direct":
            moved_NS = moved_NS.detach()
        if term == "state":
            paid_NS = paid_NS.detach()
        top_N, bottom_N = ratio_sums(paid_NS, moved_NS, rollouts, estimand)
        weight_N = rollouts.weight_N
        value = (weight_N * top_N).sum() / (weight_N * bottom_N).sum()
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    # Simple entropy does not read h, and the direct term does not read l.
    return Scores(
        *(
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(leaves, grads, strict=True)
        )
    )
