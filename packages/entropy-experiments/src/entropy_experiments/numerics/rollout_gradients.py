"""The gradient of a weighted sum of scores, for each rollout on its own; stacks of them.

    g_n = d/dtheta sum_k [ c^l_nk l_nk + c^h_nk h_nk ]        c: the cotangent of rollout n's scores

`rollout_gradients` is what callers use. `gradients_one_by_one` makes one forward and one backward
per rollout: right for any policy. A policy that offers `gradients_by_rollout` gives the same
numbers for a whole microbatch at once (`models.linear_layer_gradients`).

Stacks are dicts of [n, *shape] tensors by parameter name: n gradients or n directions. A block of
directions and a microbatch of gradients are in memory together, each under half the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from entropy_experiments.distributed import current
from entropy_experiments.numerics.derivatives import pullback
from entropy_experiments.types import BatchedPolicy, Params, Policy, Rollouts, Scores

Score = Callable[[Params, Rollouts], Scores]
BLOCK_BYTES = 256 << 20
"""Memory for gradients of single rollouts."""


def rollout_gradients(
    policy: Policy, part: Rollouts, cotangents: Sequence[Scores]
) -> list[dict[str, Tensor]]:
    """For each cotangent c, the gradients of sum_k (c_l l + c_h h) of every rollout of a part."""
    if isinstance(policy, BatchedPolicy):
        return policy.gradients_by_rollout(policy.params, part, cotangents)
    return gradients_one_by_one(policy.score, policy.params, part, cotangents)


def weighted_sum(scores: Scores, cotangent: Scores, response_NS: Tensor) -> Tensor:
    """sum over response tokens of c_l l + c_h h, c the cotangent."""
    products = (
        cotangent_NS.to(x_NS.device, x_NS.dtype) * x_NS
        for cotangent_NS, x_NS in zip(cotangent, scores, strict=True)
    )
    return torch.where(response_NS, sum(products), 0.0).sum()


def gradients_one_by_one(
    score: Score, params: Params, rollouts: Rollouts, cotangents: Sequence[Scores]
) -> list[dict[str, Tensor]]:
    """For each cotangent the gradients [n, *shape] of the rollouts, in the order given."""
    check_cotangents(rollouts, cotangents)
    gradients = []
    for cotangent in cotangents:
        rows = []
        for n in range(len(rollouts)):
            row_N = torch.tensor([n], device=rollouts.tokens_NS.device)
            # Split once more: a rollout on its own needs none of the others' padding.
            ((_, columns, alone),) = rollouts.take(row_N).split(1)
            mine = Scores(*(x_NS[row_N.to(x_NS.device), columns] for x_NS in cotangent))
            rows.append(
                pullback(lambda p: weighted_sum(score(p, alone), mine, alone.response_NS), params)[
                    1
                ]
            )
        gradients.append(
            {name: at_least_fp32(torch.stack([row[name] for row in rows])) for name in params}
        )
    return gradients


def at_least_fp32(gradient: Tensor) -> Tensor:
    """Half-precision gradients are added up in fp32."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def check_cotangents(rollouts: Rollouts, cotangents: Sequence[Scores]) -> None:
    shape = tuple(rollouts.tokens_NS.shape)
    for cotangent in cotangents:
        for name, cotangent_NS in zip(Scores._fields, cotangent, strict=True):
            if tuple(cotangent_NS.shape) != shape:
                raise ValueError(
                    f"The cotangent of {name} has shape {tuple(cotangent_NS.shape)}; expected "
                    f"{shape}, one number per position of these rollouts. Cut it like the part "
                    "itself: cotangent_NS[rows_N, columns]."
                )


def fitting(params: Params, block_bytes: int, *, each: int = 1) -> int:
    """How many rollouts with `each` gradients fit in half of the budget; at least one."""
    if block_bytes < 1:
        raise ValueError(f"block_bytes is {block_bytes}; expected a positive number of bytes.")
    # Half-precision gradients are stacked in fp32.
    size = sum(value.numel() * max(value.element_size(), 4) for value in params.values())
    return max(1, block_bytes // 2 // (each * size))


def products(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensor:
    """[n, m] inner products of two stacks in fp64, one parameter at a time."""
    parts = (x.flatten(1).double() @ right[name].flatten(1).double().mT for name, x in left.items())
    return sum(parts, torch.zeros((), dtype=torch.float64))


def stacked_rows(
    params: Params,
    rollouts: Rollouts,
    gradients: Callable[[Tensor, slice, Rollouts], Mapping[str, Tensor]],
    microbatch: int,
) -> dict[str, Tensor]:
    """[N, *shape] of all rollouts, each rank computing its own microbatches; all have all."""
    ranks = current()

    def local() -> list[Tensor]:
        # Half-precision gradients are stacked in fp32.
        out = {
            name: torch.zeros(
                (len(rollouts), *theta.shape),
                dtype=torch.promote_types(theta.dtype, torch.float32),
                device=theta.device,
            )
            for name, theta in params.items()
        }
        for rows_N, columns, part in ranks.shard(rollouts.split(microbatch)):
            for name, g in gradients(rows_N, columns, part).items():
                out[name][rows_N.to(g.device)] = g
        return list(out.values())

    return dict(zip(params, ranks.all_reduce(local), strict=True))


def stacked(directions: Sequence[Params]) -> dict[str, Tensor]:
    return {name: torch.stack([v[name] for v in directions]) for name in directions[0]}


def unstacked(stack: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Single directions, as views of the stack."""
    count = len(next(iter(stack.values())))
    return [{name: values[i] for name, values in stack.items()} for i in range(count)]
