"""How many threads a pass gets, found by timing passes.

Small operations on several threads wait for the slowest of them at every barrier. Where another
process holds a core, that is a turn of the scheduler each time, and a pass on all threads takes
many times as long as on one; large products want every thread there is. So passes are timed, with
all threads, with half as many and so on, as long as fewer are not slower; again when passes have
become much slower than they were, and now and then, since a machine is busy by chance.

Nothing is chosen unless somebody asks (`chosen_threads`: every command, and the probe inside a
training, which gets its own number back), nor where OMP_NUM_THREADS or --threads say a number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from time import perf_counter

import torch
from torch._C._functorch import get_interpreter_stack

PASSES = 4
"""Timed with each number of threads, after one that warms up. Their mean counts: on a busy machine
most passes on several threads are quick, and the others a hundred times as long."""
ENOUGH = 0.5
"""Seconds of passes that tell enough: of a large model, or on a busy machine, one or two."""
AS_QUICK = 1.05
"""Times as long as on more threads: a tie goes to fewer, which a neighbour disturbs less."""
AGAIN = 5.0
"""Seconds until passes are timed again,"""
SHARE = 50
"""and no sooner than this many times as long as that took: two percent of the time at most."""
MUCH_SLOWER = 3.0
TWICE = 2
"""Passes in a row that are much slower: one alone may have met a hiccup."""
ENOUGH_PASSES = 5
"""Passes of a kind from which on its usual time is known."""
VARIABLE = "OMP_NUM_THREADS"


class Threads:
    """The choice of one process, and how long its passes usually take."""

    def __init__(self, most: int, *, clock: Callable[[], float] = perf_counter) -> None:
        self.most, self._clock = most, clock
        self.count: int | None = None
        self._next = 0.0
        self._seconds: dict[Hashable, list[float]] = {}
        self._slow = 0

    @property
    def due(self) -> bool:
        """Whether passes should be timed: never yet, long ago, or they have become much slower."""
        return self.count is None or self._slow >= TWICE or self._clock() >= self._next

    def choose(self, work: Callable[[], object]) -> int:
        """Time `work` with all threads, half as many, ...; the quickest is set and returned."""
        began = self._clock()
        count = best = self.most
        least = self._timed(work, count)
        while count > 1:
            count //= 2
            seconds = self._timed(work, count)
            if seconds > AS_QUICK * least:
                break
            best, least = count, min(seconds, least)
        torch.set_num_threads(best)
        now = self._clock()
        self._next = now + max(AGAIN, SHARE * (now - began))
        self.count, self._slow = best, 0
        self._seconds.clear()
        return best

    @contextmanager
    def timing(self, kind: Hashable, amount: int) -> Iterator[None]:
        """A pass of `amount` tokens; passes are compared with earlier ones of their kind."""
        start = self._clock()
        yield
        seconds = (self._clock() - start) / max(amount, 1)
        earlier = self._seconds.setdefault(kind, [])
        if len(earlier) >= ENOUGH_PASSES and seconds > MUCH_SLOWER * median(earlier):
            self._slow += 1
            return
        self._slow = 0
        earlier.append(seconds)
        del earlier[:-ENOUGH_PASSES]

    def _timed(self, work: Callable[[], object], count: int) -> float:
        torch.set_num_threads(count)
        work()
        start, done = self._clock(), 0
        while done < PASSES and (done == 0 or self._clock() - start < ENOUGH):
            work()
            done += 1
        return (self._clock() - start) / done


_current: Threads | None = None
_last: Threads | None = None
"""Of the context before: a probe inside a training enters one at every step."""
_fixed = False


@contextmanager
def fixed_threads(count: int | None) -> Iterator[None]:
    """Inside, this many threads and no choice, for whoever asks; None: nothing is said."""
    global _fixed
    outer, before = _fixed, torch.get_num_threads()
    if count is not None:
        _fixed = True
        torch.set_num_threads(count)
    try:
        yield
    finally:
        _fixed = outer
        torch.set_num_threads(before)


@contextmanager
def chosen_threads() -> Iterator[None]:
    """Inside, passes choose how many threads they get; afterwards it is as it was before.

    Within another such context its choice is shared, and what is chosen inside stays until that
    one ends: `entropy-probe train` has the same neighbours as the probe in it.
    """
    global _current, _last
    outer, before = _current, torch.get_num_threads()
    if outer is None and not _fixed and VARIABLE not in os.environ and before > 1:
        _last = _last if _last is not None and _last.most == before else Threads(before)
        _current = _last
        torch.set_num_threads(_current.count or before)
    try:
        yield
    finally:
        _current = outer
        if outer is None:
            torch.set_num_threads(before)


@contextmanager
def same_threads() -> Iterator[None]:
    """Inside, nothing is tried and nothing is chosen.

    For passes that ranks make together: each rank would time as many of them as its own clock says,
    and wait for ever for a rank that timed fewer.
    """
    global _current
    outer, _current = _current, None
    try:
        yield
    finally:
        _current = outer


def choose_threads(
    device: torch.device, trial: Callable[[], object], *, anew: bool = False
) -> None:
    """By a small pass, if that is due or `anew`; only computation on the CPU waits for threads."""
    if device.type != "cpu" or _current is None or get_interpreter_stack():
        return  # a trial inside a derivative would become a part of it
    if anew or _current.due:
        with torch.no_grad():
            _current.choose(trial)


@contextmanager
def timed_pass(
    kind: Hashable, tokens: int, device: torch.device, trial: Callable[[], object]
) -> Iterator[None]:
    """A pass over so many tokens, on as many threads as are quickest."""
    choose_threads(device, trial)
    with nullcontext() if _current is None else _current.timing(kind, tokens):
        yield
