"""A probe that runs unattended beside a training: which steps, what if it fails, where rows go.

Adapters (`trl`, `loop`) say when a step is about to be made and when it was; everything that all of
them need is here. Both methods must be called on every rank, for every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.distributed import ALONE, Ranks
from entropy_experiments.estimate.own_batch import OwnBatch
from entropy_experiments.online.guard import LOG, Guard
from entropy_experiments.online.probe import OnlineProbe
from entropy_experiments.online.rows import RowFile, probed_before, row_of
from entropy_experiments.online.throttle import FARTHEST, Throttle

ROWS = "entropy_probe.jsonl"
PATIENCE = timedelta(minutes=30)
"""How long ranks in training wait for one that is late: then the probe is off, not the training."""


class Watch:
    """Guarded and throttled. Nothing that fails in here reaches the training around it."""

    def __init__(self, *, throttle: Throttle, ranks: Ranks = ALONE) -> None:
        self.ranks, self.throttle = ranks, throttle
        self.guard = Guard(ranks, on_failure=self.forget)
        self.rows: list[dict[str, Any]] = []
        """One per probed step (rank 0)."""
        self.sampling: tuple[str, ...] = ()
        """Options that make training's sampling distribution another than the policy probed."""
        self.probe: OnlineProbe | None = None
        self._file: RowFile | None = None
        self._probed_before = 0
        self._begun = False
        self.also_forget: Callable[[], None] = lambda: None
        """What an adapter holds besides the probe, to be let go with it."""
        self._said_nonfinite = self._said_never_made = self._said_throttled = False

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
        asked: Callable[[OnlineProbe], None] | None = None,
    ) -> None:
        """A step is about to be made. `always` runs for every step; the others if it is probed.

        With `asked`, which is more than a prediction, it is probed whatever that costs.
        """

        def work() -> None:
            self._begun = False
            always()
            if not self.ranks.agree(word=int(asked is not None or self.throttle.wants(step))):
                self._say_throttled(step)
                return
            if not any(group["lr"] for group in optimizer().param_groups):
                LOG.info("Step %d has learning rate 0: it moves nothing and is not probed.", step)
                return
            if self._nonfinite(gradient):
                self._say_nonfinite(step)
                return
            assert self.probe is not None
            self.throttle.note(step)
            self.probe.step = step
            own = prepare(self.probe)
            self.probe.before_step(gradient(), optimizer(), own=own)
            then(self.probe)
            self._begun = True

        with self.throttle.timing():
            self.guard.run(work, doing=f"predicting step {step}")
        probe = self.probe
        if asked is not None and self._begun and probe is not None:
            with self.throttle.timing(asked=True):
                self.guard.run(lambda: asked(probe), doing=f"explaining step {step}")

    def after(
        self,
        step: int,
        publish: Callable[[Mapping[str, Any]], None] = lambda _: None,
        *,
        scaler: bool = False,
    ) -> None:
        """The step was made; rank 0 publishes its row, if it was probed.

        `scaler`: one that may leave a step out, which is then no surprise.
        """

        def work() -> None:
            if not self._begun:
                return
            self._begun = False
            assert self.probe is not None
            found = self.probe.after_step()
            if self.ranks.rank:
                return
            if found.never_made and not scaler:
                self._say_never_made(step)
            row = row_of(
                found,
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
        self.probe, self._begun = None, False
        self.also_forget()

    def _nonfinite(self, gradient: Callable[[], Mapping[str, Tensor | None]]) -> bool:
        """Whether any rank sees a gradient that is not finite."""

        def local() -> list[Tensor]:
            found = (g for g in gradient().values() if g is not None)
            bad = sum(int(not bool(torch.isfinite(g).all())) for g in found)
            return [torch.tensor(bad)]

        return bool(self.ranks.all_reduce(local)[0])

    def _say_throttled(self, step: int) -> None:
        throttle = self.throttle
        if throttle.throttled is None or self._said_throttled or self.ranks.rank:
            return
        LOG.warning(
            "From step %d on some steps are not probed: probing takes %.0f %% of the training "
            "time, and max_overhead is %g. At least every %d steps one is. To probe more of them "
            "set max_overhead higher, or None for all; to make a probe cheaper, lower prompts or "
            "group. (Said once.)",
            step,
            100 * throttle.throttled,
            throttle.max_overhead,
            max(throttle.every, FARTHEST),
        )
        self._said_throttled = True

    def _say_never_made(self, step: int) -> None:
        if not self._said_never_made:
            LOG.warning(
                "Step %d was predicted, and no weight changed: it was never made, or is lost in "
                "the weights' rounding. Its row is not trusted. In a loop of your own, "
                "optimizer.step() belongs inside `with probe.step():`. (Said once.)",
                step,
            )
        self._said_never_made = True

    def _say_nonfinite(self, step: int) -> None:
        if not self._said_nonfinite and self.ranks.rank == 0:
            LOG.warning(
                "Step %d has a gradient that is not finite: it is not probed, and training decides "
                "what becomes of it. (Said once.)",
                step,
            )
        self._said_nonfinite = True
