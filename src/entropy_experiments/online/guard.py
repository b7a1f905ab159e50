"""Training must not feel the probe's failures: one message, all ranks off together, no hang.

Every hook of every rank ends in one exchange of flags (`Ranks.agree`). A rank that failed in the
middle meets the others there, or in whichever exchange they come to first; it speaks up once, and
nobody exchanges anything afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from entropy_experiments.numerics.ranks import ALONE, RankError, Ranks, announced

LOG = logging.getLogger("entropy_experiments.online")

T = TypeVar("T")


class Guard:
    def __init__(self, ranks: Ranks = ALONE, *, on_failure: Callable[[], None] | None = None):
        self.ranks, self.error = ranks, None
        self._on_failure = on_failure

    @property
    def off(self) -> bool:
        return self.error is not None

    def run(self, work: Callable[[], T], *, doing: str) -> T | None:
        """`work()`, or None if the probe is off or has just failed."""
        if self.off:
            return None
        try:
            found = work()
            self.ranks.agree()
            return found
        except Exception as error:  # whatever it is, training goes on
            self._leave(error, doing)
            return None

    def _leave(self, error: Exception, doing: str) -> None:
        self.error = error
        LOG.log(
            # One message is enough: the rank that failed gives it.
            logging.INFO if isinstance(error, RankError) else logging.WARNING,
            "The entropy probe failed while %s and is off from here on; training goes on. %s: %s",
            doing,
            type(error).__name__,
            error,
            exc_info=LOG.isEnabledFor(logging.DEBUG),
        )
        error.__traceback__ = None  # its frames hold rollouts and scores
        if not announced(error):
            try:
                self.ranks.agree(failed=True)
            except Exception as lost:  # the other ranks are gone, and training will say so
                LOG.debug("the other ranks could not be told: %s", lost)
        if self._on_failure is not None:
            self._on_failure()
