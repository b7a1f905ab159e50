"""A probe that runs unattended beside a training: which steps, what if it fails, where rows go.

Adapters (`trl`, `loop`) say when a step is about to be made and when it was; everything that all of
them need is here. Both methods must be called on every rank, for every step.

`Throttle` chooses the steps: every n-th, fewer when that would cost too much time.

    overhead = seconds in the probe / seconds of training without it

A step is skipped while the overhead, were it probed at the mean cost so far, would exceed
`max_overhead`; but it probes at least every 10 steps. One rank decides for all of them
(`Ranks.agree`). What was requested by its number of steps (ledgers, the noise scale) counts as
overhead, but no probed step is skipped to make up for it.

`Guard` keeps the probe's failures from training: one message, all ranks off together, no hang.
Every hook of every rank ends in one exchange of flags (`Ranks.agree`), but for those that a loop
may call on one rank alone: what fails there is told in the next exchange. A rank that failed in the
middle meets the others there, or in whichever exchange they come to first, and nobody exchanges
anything afterwards. Of several that failed the first one gives the message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from entropy_experiments.distributed import ALONE, RankError, Ranks, announced
from entropy_experiments.estimate.own_batch import OwnBatch
from entropy_experiments.online.probe import OnlineProbe, check_counts
from entropy_experiments.online.rows import RowFile, probed_before, row_of
from entropy_experiments.online.training_state import training_state_kept
from entropy_experiments.results import TrainingRow

LOG = logging.getLogger("entropy_experiments.online")

T = TypeVar("T")
FARTHEST = 10
"""Steps from one probe to the next, unless `every` is more. A curve with fewer points would miss a
collapse."""
PATIENCE = timedelta(minutes=30)
"""How long ranks in training wait for one that is late: then the probe is off, not the training."""


class Guard:
    def __init__(
        self,
        ranks: Ranks = ALONE,
        *,
        on_failure: Callable[[], None] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """`model`: in training, so that its buffers are to be as they were after each `run`."""
        self.ranks, self.error, self.model = ranks, None, model
        self._on_failure = on_failure
        self._unheard = False
        """The other ranks do not know yet that this one failed."""

    @property
    def off(self) -> bool:
        return self.error is not None

    def run(self, work: Callable[[], T], *, doing: str) -> T | None:
        """`work()`, or None if the probe is off or has just failed."""
        if self._unheard:
            self._unheard = False
            self._tell()
        if self.off:
            return None
        try:
            with training_state_kept(self.model):
                result = work()
            self.ranks.agree()
            return result
        except Exception as error:  # whatever it is, training goes on
            self._leave(error, doing)
            return None

    def run_alone(self, work: Callable[[], None], *, doing: str) -> None:
        """`work()`, without an exchange: perhaps no other rank is here.

        They hear of a failure where they come to the next `run`.
        """
        if self.off:
            return
        try:
            with training_state_kept(self.model):
                work()
        except Exception as error:  # whatever it is, training goes on
            self._unheard = True
            self._end(error, doing)

    def _leave(self, error: Exception, doing: str) -> None:
        if not announced(error):
            self._tell()
        self._end(error, doing)

    def _tell(self) -> None:
        try:
            self.ranks.agree(failed=True)
        except Exception as lost:  # the other ranks are gone, and training will say so
            LOG.debug("the other ranks could not be notified: %s", lost)

    def _end(self, error: Exception, doing: str) -> None:
        self.error = error
        mine = not isinstance(error, RankError) and self.ranks.first_failed in (
            None,
            self.ranks.rank,
        )
        LOG.log(
            logging.WARNING if mine else logging.INFO,  # one message is enough
            "The entropy probe failed while %s and is now off; training continues. %s: %s",
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
                LOG.debug("the probe's memory could not be released: %s", again)


class Throttle:
    def __init__(
        self,
        *,
        every: int = 1,
        max_overhead: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_counts({"every": every})
        number = isinstance(max_overhead, int | float)
        if max_overhead is not None and not (number and max_overhead > 0):
            raise ValueError(
                f"max_overhead is {max_overhead!r}; expected above 0, such as 0.1 for ten per cent "
                "of the training time, or None for no limit."
            )
        self.every, self.max_overhead = every, max_overhead
        self._clock, self._began = clock, clock()
        self.seconds, self.requested_seconds, self.probed = 0.0, 0.0, 0
        self._last: int | None = None
        self.throttled: float | None = None
        """The overhead at which a step was first skipped to save time."""

    @contextmanager
    def timing(self, *, requested: bool = False) -> Iterator[None]:
        """Time spent here is the probe's. `requested`: for what is not skipped to save time."""
        began = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - began
            if requested:
                self.requested_seconds += spent
            else:
                self.seconds += spent

    @property
    def training(self) -> float:
        """Seconds of training without the probe, so far."""
        return self._clock() - self._began - self.seconds - self.requested_seconds

    @property
    def overhead(self) -> float:
        """Of the training time so far."""
        training = self.training
        return (self.seconds + self.requested_seconds) / training if training > 0 else 0.0

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


class Watch:
    """Guarded and throttled. Nothing that fails in here reaches the training around it."""

    def __init__(
        self, *, throttle: Throttle, ranks: Ranks = ALONE, model: nn.Module | None = None
    ) -> None:
        self.ranks, self.throttle = ranks, throttle
        self.guard = Guard(ranks, on_failure=self.forget, model=model)
        self.rows: list[TrainingRow] = []
        """One per probed step (rank 0)."""
        self.sampling: tuple[str, ...] = ()
        """Options that make training's sampling distribution another than the policy probed."""
        self.probe: OnlineProbe | None = None
        self._file: RowFile | None = None
        self._probed_before = 0
        self._predicted = False
        self.also_forget: Callable[[], None] = lambda: None
        """What an adapter holds besides the probe, to be let go with it."""
        self._warned_nonfinite = self._warned_skipped = self._warned_throttled = False

    def set_up(self, build: Callable[[], OnlineProbe], rows: Path | None, *, step: int = 0) -> None:
        """Make the probe; rows are appended to this file, if one is given.

        `step`: training goes on from there, and the file may have rows of the steps before it.
        """

        def work() -> None:
            self.probe = build()
            if rows is not None and self.ranks.rank == 0:
                self._file = RowFile(rows)
                self._probed_before = probed_before(rows, step)

        self.guard.run(work, doing="it was set up")

    def before(
        self,
        step: int,
        gradient: Callable[[], Mapping[str, Tensor | None]],
        optimizer: Callable[[], torch.optim.Optimizer],
        *,
        prepare: Callable[[OnlineProbe], OwnBatch | None] = lambda _: None,
        then: Callable[[OnlineProbe], None] = lambda _: None,
        always: Callable[[], None] = lambda: None,
        explain: Callable[[OnlineProbe], None] | None = None,
    ) -> None:
        """A step is about to be made. `always` runs for every step; the others if it is probed.

        With `explain`, which is more than a prediction, it is probed whatever that costs.
        """

        def work() -> None:
            self._predicted = False
            always()
            if not self.ranks.agree(word=int(explain is not None or self.throttle.wants(step))):
                self._warn_throttled(step)
                return
            if not any(group["lr"] for group in optimizer().param_groups):
                LOG.info("Step %d has learning rate 0: it moves nothing and is not probed.", step)
                return
            if self._nonfinite(gradient):
                self._warn_nonfinite(step)
                return
            assert self.probe is not None
            self.throttle.note(step)
            self.probe.step = step
            own = prepare(self.probe)
            self.probe.before_step(gradient(), optimizer(), own=own)
            then(self.probe)
            self._predicted = True

        with self.throttle.timing():
            self.guard.run(work, doing=f"predicting step {step}")
        probe = self.probe
        if explain is not None and self._predicted and probe is not None:
            with self.throttle.timing(requested=True):
                self.guard.run(lambda: explain(probe), doing=f"explaining step {step}")

    def after(
        self,
        step: int,
        publish: Callable[[TrainingRow], None] = lambda _: None,
        *,
        scaler: bool = False,
    ) -> None:
        """The step was made; rank 0 publishes its row, if it was probed.

        `scaler`: one that may leave a step out, which is then no surprise.
        """

        def work() -> None:
            if not self._predicted:
                return
            self._predicted = False
            assert self.probe is not None
            measurement = self.probe.after_step()
            if self.ranks.rank:
                return
            if measurement.never_made and not scaler:
                self._warn_skipped(step)
            row = row_of(
                measurement,
                step=step,
                probed_steps=self._probed_before + self.throttle.probed,
                overhead=self.throttle.overhead,
                sampling=self.sampling,
            )
            self.rows.append(row)
            publish(row)
            if self._file is not None:
                self._file.add(row)

        with self.throttle.timing():
            self.guard.run(work, doing=f"measuring step {step}")

    def forget(self) -> None:
        """Let go of everything large."""
        self.probe, self._predicted = None, False
        self.also_forget()

    def _nonfinite(self, gradient: Callable[[], Mapping[str, Tensor | None]]) -> bool:
        """Whether any rank sees a gradient that is not finite."""

        def local() -> list[Tensor]:
            gradients = (g for g in gradient().values() if g is not None)
            bad = sum(int(not bool(torch.isfinite(g).all())) for g in gradients)
            return [torch.tensor(bad)]

        return bool(self.ranks.all_reduce(local)[0])

    def _warn_throttled(self, step: int) -> None:
        throttle = self.throttle
        if throttle.throttled is None or self._warned_throttled or self.ranks.rank:
            return
        LOG.warning(
            "From step %d on some steps are not probed: probing takes %.0f %% of the training "
            "time, and max_overhead is %g. At least every %d steps one is. To probe more of them "
            "set max_overhead higher, or None for all; to make a probe cheaper, lower prompts or "
            "group. (Logged once.)",
            step,
            100 * throttle.throttled,
            throttle.max_overhead,
            max(throttle.every, FARTHEST),
        )
        self._warned_throttled = True

    def _warn_skipped(self, step: int) -> None:
        if not self._warned_skipped:
            LOG.warning(
                "Step %d was predicted, and no weight changed: it was never made, or is lost in "
                "the weights' rounding. Its row is not trusted. In a loop of your own, "
                "optimizer.step() belongs inside `with probe.step():`. (Logged once.)",
                step,
            )
        self._warned_skipped = True

    def _warn_nonfinite(self, step: int) -> None:
        if not self._warned_nonfinite and self.ranks.rank == 0:
            LOG.warning(
                "Step %d has a gradient that is not finite: it is not probed, and training decides "
                "what becomes of it. (Logged once.)",
                step,
            )
        self._warned_nonfinite = True
