"""The gradient of a weighted sum of scores, for each rollout on its own, the plain way.

    g_n = d/dtheta sum_k [ worth_l_nk l_nk + worth_h_nk h_nk ]

One forward and one backward per rollout: right for any policy. Where the model allows it,
`models.rollout_gradients` gives the same numbers for a whole microbatch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from entropy_experiments.numerics.derivatives import pullback
from entropy_experiments.types import Params, Rollouts, Scores

Score = Callable[[Params, Rollouts], Scores]


def weighted_sum(scores: Scores, worth: Scores, response_NS: Tensor) -> Tensor:
    """sum over response tokens of worth_l l + worth_h h."""
    products = (
        worth_NS.to(x_NS.device, x_NS.dtype) * x_NS
        for worth_NS, x_NS in zip(worth, scores, strict=True)
    )
    return torch.where(response_NS, sum(products), 0.0).sum()


def one_by_one(
    score: Score, params: Params, rollouts: Rollouts, worths: Sequence[Scores]
) -> list[dict[str, Tensor]]:
    """For each worth the gradients [n, *shape] of the rollouts, in the order given."""
    check_worths(rollouts, worths)
    found = []
    for worth in worths:
        rows = []
        for n in range(len(rollouts)):
            row_N = torch.tensor([n], device=rollouts.tokens_NS.device)
            # Split once more: a rollout on its own needs none of the others' padding.
            ((_, columns, alone),) = rollouts.take(row_N).split(1)
            mine = Scores(*(x_NS[row_N.to(x_NS.device), columns] for x_NS in worth))
            rows.append(
                pullback(lambda p: weighted_sum(score(p, alone), mine, alone.response_NS), params)[
                    1
                ]
            )
        found.append({name: full(torch.stack([row[name] for row in rows])) for name in params})
    return found


def full(gradient: Tensor) -> Tensor:
    """Half-precision gradients are added up in fp32."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def check_worths(rollouts: Rollouts, worths: Sequence[Scores]) -> None:
    shape = tuple(rollouts.tokens_NS.shape)
    for worth in worths:
        for name, worth_NS in zip(Scores._fields, worth, strict=True):
            if tuple(worth_NS.shape) != shape:
                raise ValueError(
                    f"The worth of {name} has shape {tuple(worth_NS.shape)}; expected {shape}, "
                    "one number per position of these rollouts. Cut it like the part itself: "
                    "worth_NS[rows_N, columns]."
                )
