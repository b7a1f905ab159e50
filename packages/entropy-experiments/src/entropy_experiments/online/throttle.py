"""Which steps are probed: every n-th, fewer when that would cost too much time.

    overhead = seconds in the probe / seconds of training without it

A step is skipped while the overhead, were it probed at the mean cost so far, would exceed
`max_overhead`; but no two probes are more than ten steps apart for that. One rank decides for all
of them (`Ranks.agree`). What was asked for by its number of steps (ledgers, the noise scale) is in
the overhead, but no probed step is skipped to make up for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from entropy_experiments.online.arguments import check_counts

FARTHEST = 10
"""Steps from one probe to the next, unless `every` is more. A curve with fewer points would miss a
collapse."""


class Throttle:
    def __init__(
        self,
        *,
        every: int = 1,
        max_overhead: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_counts(every=every)
        number = isinstance(max_overhead, int | float)
        if max_overhead is not None and not (number and max_overhead > 0):
            raise ValueError(
                f"max_overhead is {max_overhead!r}; expected above 0, such as 0.1 for ten per cent "
                "of the training time, or None for no limit."
            )
        self.every, self.max_overhead = every, max_overhead
        self._clock, self._began = clock, clock()
        self.seconds, self.asked_seconds, self.probed = 0.0, 0.0, 0
        self._last: int | None = None
        self.throttled: float | None = None
        """The overhead at which a step was first skipped to save time."""

    @contextmanager
    def timing(self, *, asked: bool = False) -> Iterator[None]:
        """Time spent here is the probe's. `asked`: for what is not skipped to save time."""
        began = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - began
            if asked:
                self.asked_seconds += spent
            else:
                self.seconds += spent

    @property
    def training(self) -> float:
        """Seconds of training without the probe, so far."""
        return self._clock() - self._began - self.seconds - self.asked_seconds

    @property
    def overhead(self) -> float:
        """Of the training time so far."""
        training = self.training
        return (self.seconds + self.asked_seconds) / training if training > 0 else 0.0

    def wants(self, step: int) -> bool:
        """Whether `step` (counted from 0) is to be probed."""
        if step % self.every:
            return False
        if self.max_overhead is None or self._last is None:
            return True
        if step + self.every - self._last > max(self.every, FARTHEST):
            return True  # the next turn would come too late
        cost = self.seconds / max(self.probed, 1)
        affordable = self.seconds + cost <= self.max_overhead * self.training
        if not affordable and self.throttled is None:
            self.throttled = self.overhead
        return affordable

    def note(self, step: int) -> None:
        """This step is being probed."""
        self._last, self.probed = step, self.probed + 1
