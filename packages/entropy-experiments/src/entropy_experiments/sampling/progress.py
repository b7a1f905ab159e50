"""How far sampling has come: what a callback receives, and a bar that shows it on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Progress:
    name: str
    """Which batch: "evaluation", "update", ..."""
    rollouts: int
    """Finished, those found in the store included."""
    total: int
    tokens: int
    """Drawn in this run."""
    seconds: float
    finished_unit: bool
    """False while a unit is being drawn; True once it is finished (and saved, given a store)."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


ProgressCallback = Callable[[Progress], None]


LINE_EVERY = 15.0
"""Seconds between two lines where there is no terminal."""


class ProgressBar:
    """A rich bar on stderr, or now and then a line where that is no terminal; ends at 100 %."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._lines = 0

    def __call__(self, progress: Progress) -> None:
        if not sys.stderr.isatty():
            self._line(progress)
            return
        if self._bar is None:
            self._bar = self._opened(progress)
        self._bar.update(
            self._task, completed=progress.rollouts, speed=f"{progress.tokens_per_second:.0f} tok/s"
        )
        if progress.rollouts == progress.total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _line(self, progress: Progress) -> None:
        # Short draws stay silent; a run in the background shows that it is alive.
        due = int(progress.seconds / LINE_EVERY)
        if due > self._lines:
            count = f"{progress.rollouts} of {progress.total} rollouts"
            speed = f"{progress.tokens} tokens, {progress.tokens_per_second:.0f} tok/s"
            print(f"drawing {progress.name}: {count}, {speed}", file=sys.stderr, flush=True)
        self._lines = due

    def _opened(self, progress: Progress) -> Any:
        from rich import progress as rich
        from rich.console import Console

        bar = rich.Progress(
            rich.TextColumn("drawing {task.description}"),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.fields[speed]}"),
            rich.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        bar.start()
        self._task = bar.add_task(progress.name, total=progress.total, speed="")
        return bar


class Meter:
    """Counts what was drawn and tells the callback."""

    def __init__(self, callback: ProgressCallback | None, name: str, total: int) -> None:
        self.callback, self.name, self.total = callback, name, total
        self.rollouts = self.tokens = 0
        self.begun = time.monotonic()

    def tokens_drawn(self, count: int) -> None:
        self.tokens += count
        self._tell(finished_unit=False)

    def finished(self, rollouts: int) -> None:
        self.rollouts += rollouts
        self._tell(finished_unit=True)

    def _tell(self, *, finished_unit: bool) -> None:
        if self.callback is not None:
            self.callback(
                Progress(
                    name=self.name,
                    rollouts=self.rollouts,
                    total=self.total,
                    tokens=self.tokens,
                    seconds=time.monotonic() - self.begun,
                    finished_unit=finished_unit,
                )
            )
