"""The gradient of a weighted sum of scores, for each rollout on its own, the plain way.

    g_n = d/dtheta sum_k [ c^l_nk l_nk + c^h_nk h_nk ]

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


def weighted_sum(scores: Scores, cotangent: Scores, response_NS: Tensor) -> Tensor:
    """sum over response tokens of c_l l + c_h h, c the cotangent."""
    products = (
        cotangent_NS.to(x_NS.device, x_NS.dtype) * x_NS
        for cotangent_NS, x_NS in zip(cotangent, scores, strict=True)
    )
    return torch.where(response_NS, sum(products), 0.0).sum()


def one_by_one(
    score: Score, params: Params, rollouts: Rollouts, cotangents: Sequence[Scores]
) -> list[dict[str, Tensor]]:
    """For each cotangent the gradients [n, *shape] of the rollouts, in the order given."""
    check_worths(rollouts, cotangents)
    found = []
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
        found.append({name: full(torch.stack([row[name] for row in rows])) for name in params})
    return found


def full(gradient: Tensor) -> Tensor:
    """Half-precision gradients are added up in fp32."""
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def check_worths(rollouts: Rollouts, cotangents: Sequence[Scores]) -> None:
    shape = tuple(rollouts.tokens_NS.shape)
    for cotangent in cotangents:
        for name, cotangent_NS in zip(Scores._fields, cotangent, strict=True):
            if tuple(cotangent_NS.shape) != shape:
                raise ValueError(
                    f"The cotangent of {name} has shape {tuple(cotangent_NS.shape)}; expected "
                    f"{shape}, one number per position of these rollouts. Cut it like the part "
                    "itself: cotangent_NS[rows_N, columns]."
                )
