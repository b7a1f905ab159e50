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
    width: int

    def restored(self, x_NS: Tensor) -> Tensor:
        """Values of the repacked rollouts, back in the original order and columns."""
        inside_NS = x_NS[:, self.left : self.left + self.width]
        out_NS = torch.empty_like(inside_NS)
        out_NS[self.rows_N] = inside_NS
        return out_NS


def repackings_of(
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
        width = rollouts.tokens_NS.shape[1]
        yield Repacking(rollouts=packed, microbatch=size, rows_N=rows_N, left=left, width=width)


def spread(
    estimator: Callable[[Rollouts, int], float],
    here: float,
    rollouts: Rollouts,
    microbatch: int,
    *,
    count: int,
    generator: torch.Generator | None = None,
) -> float | None:
    """Root mean square difference from `here`, the value as first packed; None if count is 0."""
    if count == 0:
        return None
    packings = repackings_of(rollouts, microbatch, count=count, generator=generator)
    squares = [(estimator(p.rollouts, p.microbatch) - here) ** 2 for p in packings]
    return (sum(squares) / count) ** 0.5
