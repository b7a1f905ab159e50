"""Training must not feel the probe's failures: one message, all ranks off together, no hang.

Every hook of every rank ends in one exchange of flags (`Ranks.agree`). A rank that failed in the
middle meets the others there, or in whichever exchange they come to first, and nobody exchanges
anything afterwards. Of several that failed the first one gives the message.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from entropy_experiments.distributed import ALONE, RankError, Ranks, announced

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
        if not announced(error):
            try:
                self.ranks.agree(failed=True)
            except Exception as lost:  # the other ranks are gone, and training will say so
                LOG.debug("the other ranks could not be told: %s", lost)
        mine = not isinstance(error, RankError) and self.ranks.first_failed in (
            None,
            self.ranks.rank,
        )
        LOG.log(
            logging.WARNING if mine else logging.INFO,  # one message is enough
            "The entropy probe failed while %s and is off from here on; training goes on. %s: %s",
            doing,
            type(error).__name__,
            error,
            exc_info=LOG.isEnabledFor(logging.DEBUG),
        )
        error.__traceback__ = None  # its frames hold rollouts and scores
        if self._on_failure is not None:
            try:
                self._on_failure()
            except Exception as again:  # the message above tells what matters
                LOG.debug("what the probe held could not be let go: %s", again)
