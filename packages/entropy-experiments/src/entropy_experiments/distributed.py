"""Several processes, one answer: who computes what, and what happens when one of them fails.

Every rank holds the same parameters and the same rollouts. Microbatches are dealt out in turn, each
rank fills in the rows that are its own, and one sum over ranks completes them: adding zeros is
exact, so an answer does not depend on the number of ranks.

A rank that raises while the others wait for its sum would be a hang. So every sum is preceded by an
exchange of one flag: a rank that failed says so there, once, and all leave together.

    rank 0   compute   flag 0   ...           RankError
    rank 1   raises    flag 1   its own error

Which processes share a computation is said once, around it, and not in every call:

    with across(Ranks.all()):
        measured(policy, rollouts, direction, eta)

Every loop over microbatches inside asks `current()`. A rank's own share of such a loop is computed
alone: what it calls is not dealt out once more.

A model cut over the ranks (`models.sharded`) is the exception to both: a rank holds *shards* of the
parameters (torch's DTensor), and a pass needs all ranks at once. So each pass begins with the same
exchange, and ranks that are out of step find out there instead of waiting for each other. torch's
own float(DTensor) is the local shard's number (2.13), so sums over parameters go through
`local_part` and `shards_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
PATIENCE = timedelta(hours=12)
"""How long a rank waits for another. A rank that is gone is noticed at once, a slow one is not
gone; so this is only for machines that vanish without closing their connections."""


class RankError(RuntimeError):
    """Another rank raised, or is gone."""


class LostRankError(RankError):
    """Another rank ended without a word: killed, or its machine is gone."""


class RankValueError(RankError, ValueError):
    """Another rank refused an input with a ValueError of this message.

    What catches a refusal and goes on does so on every rank then, as it would in one process.
    """


LOST = (
    "Another rank is gone ({}). Start the same command again: what is finished is on disk and is "
    "not computed again."
)


class Ranks:
    """The processes that share a computation; alone, nothing is communicated.

    `group` must work on CPU tensors (gloo): what travels is one number per token, and sums of
    gradients, as large as the trainable parameters. Parameters travel in a mesh (`models.sharded`).
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size: int = 1 if group is None else dist.get_world_size(group)
        self.rank: int = 0 if group is None else dist.get_rank(group)
        self.first_failed: int | None = None
        """The lowest rank that said it failed, as every rank knows it."""

    @classmethod
    def all(cls, patience: timedelta = PATIENCE) -> Ranks:
        """Every process of this job, in a group of their own: called by all of them at once.

        `patience`: after which a rank that does not come to an exchange is given up.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return ALONE
        group: Any = dist.new_group(backend="gloo", timeout=patience)
        return cls(group)

    @property
    def first(self) -> bool:
        """Whether this rank is the one that writes and speaks."""
        return self.rank == 0

    def shard(self, parts: Iterable[T]) -> Iterator[T]:
        return islice(parts, self.rank, None, self.size)

    def all_reduce(self, local: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
        """The sum over ranks of each tensor that `local` gives, on the tensor's own device.

        A shard is not a share: the sum over ranks was made when the gradient was cut.
        """
        outcome = self._together(local)
        if self.group is None:
            return list(outcome)
        out = []
        for value in outcome:
            if is_shard(value):
                out.append(value)
                continue
            shared = value.detach().to("cpu", copy=True).contiguous()
            with _noticing_loss():
                dist.all_reduce(shared, group=self.group)
            out.append(shared.to(value.device))
        return out

    def all_gather(self, local: Callable[[], T]) -> list[T]:
        """What `local` gives on every rank, in the order of ranks. For small objects."""
        outcome = self._together(local)
        if self.group is None:
            return [outcome]
        everyone: list[Any] = [None] * self.size
        with _noticing_loss():
            dist.all_gather_object(everyone, outcome, group=self.group)
        return everyone

    def broadcast_from_zero(self, local: Callable[[], T]) -> T:
        """What `local` gives on rank 0, on every rank; no other rank calls it."""
        outcome = self._together(lambda: local() if self.first else None)
        return cast(T, self._from(0, outcome))

    def _from(self, rank: int, value: Any) -> Any:
        if self.group is None:
            return value
        box = [value]
        with _noticing_loss():
            source = dist.get_global_rank(self.group, rank)
            dist.broadcast_object_list(box, src=source, group=self.group)
        return box[0]

    def in_turn(self, local: Callable[[], T]) -> T:
        """`local` on every rank, one after the other: what needs much memory for a moment."""
        results = [
            self._together(lambda: local() if mine else None)
            for mine in (turn == self.rank for turn in range(self.size))
        ]
        return cast(T, results[self.rank])

    def agree(
        self,
        *,
        failed: bool = False,
        word: int = 0,
        error: BaseException | None = None,
        passing: bool = False,
    ) -> int:
        """Exchange flags; returns rank 0's `word`. Raises RankError if another rank failed.

        A rank that failed may say with which `error`: the others then raise its message, as a
        ValueError too if it is one. `passing`: a pass of a sharded model begins, on all ranks.

        Every collective begins with this one, so a rank that failed anywhere meets the others in
        their next exchange, whichever it is.
        """
        if self.group is None:
            return word
        # Who failed, who begins a pass, and what rank 0 says: the others add nothing to that.
        flags = torch.zeros(self.size + 2, dtype=torch.long)
        flags[self.rank], flags[-2] = int(failed), int(passing)
        flags[-1] = word if self.rank == 0 else 0
        with _noticing_loss():
            dist.all_reduce(flags, group=self.group)
        *each, passes, word = flags.tolist()
        if any(each):
            self.first_failed = each.index(1)
            failure = None if error is None else (str(error), isinstance(error, ValueError))
            failure = self._from(self.first_failed, failure)
            if not failed:
                message, refused = failure or ("", False)
                if refused:
                    raise RankValueError(message)
                raise RankError(
                    f"{sum(each)} of {self.size} ranks failed; rank {self.first_failed} says why."
                )
        elif passes not in (0, self.size):
            raise RankError(
                f"{passes} of {self.size} ranks begin a pass of the sharded model, the others do "
                "not; expected all at once. What is computed here cannot be shared out on a "
                "sharded model."
            )
        return word

    def _together(self, local: Callable[[], T]) -> T:
        try:
            with across(ALONE):
                outcome = local()
        except Exception as error:
            if announced(error):  # in a pass of a sharded model, which all ranks make
                raise
            self.agree(failed=True, error=error)
            raise known_to_all(error) from None
        self.agree()
        return outcome


ALONE = Ranks()
_CURRENT: ContextVar[Ranks] = ContextVar("ranks", default=ALONE)


def current() -> Ranks:
    """The processes that share what is computed here."""
    return _CURRENT.get()


@contextmanager
def across(ranks: Ranks) -> Iterator[Ranks]:
    """Inside, every loop over microbatches is dealt out to `ranks`, each of which must come."""
    token = _CURRENT.set(ranks)
    try:
        yield ranks
    finally:
        _CURRENT.reset(token)


@contextmanager
def _noticing_loss() -> Iterator[None]:
    """An exchange that breaks is a process that has ended, as one that is killed does."""
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(LOST.format(str(error).splitlines()[0])) from error


def known_to_all(error: Exception) -> Exception:
    """The same error, marked: the other ranks know of it, and must not be told again."""
    error.announced_to_ranks = True  # type: ignore[attr-defined]
    return error


def announced(error: BaseException) -> bool:
    """Whether the other ranks know; also of the error that this one was made of."""
    if isinstance(error, RankError) or getattr(error, "announced_to_ranks", False):
        return True
    return error.__cause__ is not None and announced(error.__cause__)


_HOLDERS: dict[str, Ranks] = {}
"""By the name of a mesh's process group: the ranks that hold the shards. One per mesh, of which
there are few: like the groups themselves they last as long as the process."""


def hold_shards(group: dist.ProcessGroup, ranks: Ranks) -> None:
    """Say that shards over `group` are held by `ranks`, whose exchanges come first."""
    _HOLDERS[group.group_name] = ranks


def is_shard(value: Any) -> bool:
    """Whether this rank holds a part of the tensor (torch's DTensor) and not the whole."""
    return hasattr(value, "device_mesh")


def local_part(value: Tensor) -> Tensor:
    """What of a tensor is on this rank, without a gradient: all of it, unless it is a shard."""
    return cast(Any, value.detach()).to_local() if is_shard(value) else value.detach()


def shards_of(params: Mapping[str, Tensor]) -> Ranks:
    """The ranks that hold these tensors' shards; `ALONE` for whole ones."""
    for value in params.values():
        if is_shard(value):
            group = cast(Any, value).device_mesh.get_group()
            return _HOLDERS.get(group.group_name) or Ranks(group)
    return ALONE
