"""Document 002's `distributed_helpers`; the home is `distributed`.

Sums travel, never means of ratios: a token mean over ranks is the sum of entropies over the sum of
tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from entropy_experiments.distributed import ALONE, PATIENCE, RankError, Ranks, across, current

__all__ = [
    "ALONE",
    "PATIENCE",
    "RankError",
    "Ranks",
    "across",
    "all_reduce_scalar_sum",
    "count_global",
    "current",
    "get_dist_info",
    "is_distributed",
]


def is_distributed() -> bool:
    """Whether torch.distributed runs with more than one process."""
    available = torch.distributed.is_available() and torch.distributed.is_initialized()
    return available and torch.distributed.get_world_size() > 1


def get_dist_info() -> tuple[bool, int, int]:
    """(whether distributed, this process's rank, how many there are)."""
    if not is_distributed():
        return False, 0, 1
    return True, torch.distributed.get_rank(), torch.distributed.get_world_size()


def all_reduce_scalar_sum(value: float | Tensor, ranks: Ranks | None = None) -> float:
    """The sum over the ranks, in float64; every rank calls it at once."""
    alone = torch.as_tensor(value, dtype=torch.float64).detach().reshape(1)
    return float((ranks or Ranks.all()).all_reduce(lambda: [alone])[0])


def count_global(n_local: int, ranks: Ranks | None = None) -> int:
    """How many there are on all ranks."""
    return round(all_reduce_scalar_sum(float(n_local), ranks))
