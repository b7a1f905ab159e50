"""Several processes, one answer: who computes what, and what happens when one of them fails.

Every rank holds the same parameters and the same rollouts. Microbatches are dealt out in turn, each
rank fills in the rows that are its own, and one sum over ranks completes them: adding zeros is
exact, so an answer does not depend on the number of ranks.

A rank that raises while the others wait for its sum would be a hang. So every sum is preceded by an
exchange of one flag: a rank that failed says so there, once, and all leave together.

    rank 0   compute   flag 0   ...           RankError
    rank 1   raises    flag 1   its own error
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank raised; its own message tells why."""


class Ranks:
    """The processes that share a computation; alone, nothing is communicated.

    `group` must work on CPU tensors (gloo): what travels is one number per token, not parameters.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    @classmethod
    def all(cls) -> Ranks:
        """Every process of this job, in a group of their own: called by all of them at once."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return ALONE
        return cls(dist.new_group(backend="gloo"))  # pyright: ignore[reportArgumentType]

    def mine(self, parts: Iterable[T]) -> Iterator[T]:
        return islice(parts, self.rank, None, self.size)

    def summed(self, local: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        """The sum over ranks of each tensor that `local` gives, on the tensor's own device."""
        found = self._together(local)
        if self.group is None:
            return list(found)
        out = []
        for value in found:
            shared = value.detach().to("cpu", copy=True).contiguous()
            dist.all_reduce(shared, group=self.group)
            out.append(shared.to(value.device))
        return out

    def gathered(self, local: Callable[[], T]) -> list[T]:
        """What `local` gives on every rank, in the order of ranks. For small objects."""
        found = self._together(local)
        if self.group is None:
            return [found]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, found, group=self.group)
        return everyone

    def agree(self, *, failed: bool = False, word: int = 0) -> int:
        """Exchange flags; returns rank 0's `word`. Raises RankError if another rank failed.

        Every collective begins with this one, so a rank that failed anywhere meets the others in
        their next exchange, whichever it is.
        """
        if self.group is None:
            return word
        # Who failed, and what rank 0 says; the others contribute nothing to the latter.
        flags = torch.tensor([int(failed), word if self.rank == 0 else 0])
        dist.all_reduce(flags, group=self.group)
        if int(flags[0]) and not failed:
            raise RankError(
                f"{int(flags[0])} of {self.size} ranks failed; its own message says why."
            )
        return int(flags[1])

    def _together(self, local: Callable[[], T]) -> T:
        try:
            found = local()
        except Exception as error:
            self.agree(failed=True)
            raise _announced(error) from None
        self.agree()
        return found


ALONE = Ranks()


def _announced(error: Exception) -> Exception:
    """The same error, marked: the other ranks know of it, and must not be told again."""
    error.announced_to_ranks = True  # type: ignore[attr-defined]
    return error


def announced(error: BaseException) -> bool:
    return isinstance(error, RankError) or getattr(error, "announced_to_ranks", False)
