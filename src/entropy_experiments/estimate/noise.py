"""The noise floor: how far an estimator moves when nothing but its packing does.

Rounding depends on padding, order and microbatch. At eta = 0 in one and the same packing every
measurement gives exactly 0, which is no floor; random repackings show the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from entropy_experiments.types import Rollouts

REPACKINGS = 5
SEED = 0
MAX_PADDING = 7


@dataclass(frozen=True, kw_only=True, eq=False)
class Repacking:
    """The same rollouts in another order, padding and microbatch."""

    rollouts: Rollouts
    microbatch: int
    rows_N: Tensor
    left: int

    def restored(self, x_NS: Tensor) -> Tensor:
        """Values of the repacked rollouts, back in the original order and columns."""
        width = x_NS.shape[1] - self.left
        out_NS = torch.empty_like(x_NS[:, self.left :])
        out_NS[self.rows_N] = x_NS[:, self.left : self.left + width]
        return out_NS


def repackings(
    rollouts: Rollouts, microbatch: int, *, count: int, generator: torch.Generator | None = None
) -> Iterator[Repacking]:
    """`count` random repackings, from a fixed seed unless a generator is given."""
    generator = generator or torch.Generator().manual_seed(SEED)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    for _ in range(count):
        rows_N = torch.randperm(len(rollouts), generator=generator).to(rollouts.tokens_NS.device)
        left = draw(MAX_PADDING + 1)
        packed = rollouts.take(rows_N).padded(left, draw(MAX_PADDING + 1))
        size = 1 + draw(max(1, 2 * microbatch))
        yield Repacking(rollouts=packed, microbatch=size, rows_N=rows_N, left=left)


def spread(
    estimator: Callable[[Rollouts, int], float],
    rollouts: Rollouts,
    microbatch: int,
    *,
    count: int,
    generator: torch.Generator | None = None,
) -> float | None:
    """Root mean square difference from the given packing; None if count is 0."""
    if count == 0:
        return None
    here = estimator(rollouts, microbatch)
    packings = repackings(rollouts, microbatch, count=count, generator=generator)
    squares = [(estimator(p.rollouts, p.microbatch) - here) ** 2 for p in packings]
    return (sum(squares) / count) ** 0.5
