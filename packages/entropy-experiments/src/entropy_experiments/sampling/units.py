"""Units of rollouts, decoded together: what a `RolloutStore` keeps, who draws them, how fast.

    key = sha256([seed, prompt] of every row)

The store's identity holds what all units share (model, distribution, lengths), the key the rest.

Units that nobody has yet are dealt out to the current ranks. Each rank stores what it has drawn
at once, so a lost rank costs the unit that it was drawing (the others may finish theirs: see
`finishing`); in the end all ranks have all units.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.distributed import current
from entropy_experiments.sampling.decode import Draw, Drawn
from entropy_experiments.sampling.finishing import current_unit
from entropy_experiments.sampling.rollout_files import RolloutStore

LINE_EVERY = 15.0
"""Seconds between two lines where there is no terminal."""
Unit = Sequence[Draw]


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
    """Counts what was drawn and reports it to the callback."""

    def __init__(self, callback: ProgressCallback | None, name: str, total: int) -> None:
        self.callback, self.name, self.total = callback, name, total
        self.rollouts = self.tokens = 0
        self.begun = time.monotonic()

    def tokens_drawn(self, count: int) -> None:
        self.tokens += count
        self._report(finished_unit=False)

    def finished(self, rollouts: int) -> None:
        self.rollouts += rollouts
        self._report(finished_unit=True)

    def _report(self, *, finished_unit: bool) -> None:
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


def draw_units(
    units: Sequence[Unit],
    decode: Callable[[Unit, Meter], list[Drawn]],
    store: RolloutStore | None,
    identity: Mapping[str, Any] | None,
    meter: Meter,
    *,
    together: bool = False,
) -> list[dict[int, list[Drawn]]]:
    """By rank: the units that it read from its store or drew, each under its number.

    `together`: no rank can decode alone (a sharded model). All decode every unit with the tokens
    that rank 0 draws, and rank 0 keeps them.
    """
    ranks, keys = current(), [unit_key(unit) for unit in units]

    def stored_units() -> set[int]:
        if store is None:
            return set()
        store.bind(identity or {})  # a machine with a disk of its own has a folder of its own
        return {at for at, key in enumerate(keys) if store.holds(key)}

    if store is not None:
        ranks.broadcast_from_zero(
            lambda: store.bind(identity or {})
        )  # rank 0 first: it makes the folder
    stored_by_rank = ranks.all_gather(stored_units)
    # A file that several ranks see is read by one of them.
    reader = {at: rank for rank in reversed(range(ranks.size)) for at in stored_by_rank[rank]}
    missing = [at for at in range(len(units)) if at not in reader]

    def own_units() -> dict[int, list[Drawn]]:
        out: dict[int, list[Drawn]] = {}
        for at, rank in reader.items():
            if rank == ranks.rank and store is not None:
                tensors = store.get(keys[at])
                assert tensors is not None  # it was there a moment ago
                out[at] = unpack_drawn(tensors, len(units[at]))
                meter.finished(len(units[at]))
        for at in missing if together else ranks.shard(missing):
            # Nothing to finish without a store, nor where all ranks are needed and one is gone.
            with nullcontext() if store is None or together else current_unit():
                drawn = decode(units[at], meter)
                if together and not ranks.first:
                    continue
                out[at] = drawn
                if store is not None:
                    store.put(keys[at], pack_drawn(out[at]))
            meter.finished(len(units[at]))
        return out

    units_by_rank = ranks.all_gather(own_units)
    others = [part for rank, part in enumerate(units_by_rank) if rank != ranks.rank]
    if others:
        meter.finished(sum(len(drawn) for part in others for drawn in part.values()))
    return units_by_rank


def unit_key(unit: Sequence[Draw]) -> str:
    """Everything that determines the unit's tokens besides the store's identity."""
    text = json.dumps([[draw.seed, draw.prompt] for draw in unit]).encode()
    return hashlib.sha256(text).hexdigest()


def pack_drawn(drawn: Sequence[Drawn]) -> dict[str, Tensor]:
    """Of all rows one after another: lengths, tokens, log-probs; fp64, so that bits come back."""
    return {
        "length_N": torch.tensor([len(rollout.tokens) for rollout in drawn]),
        "tokens_T": torch.tensor([t for x in drawn for t in x.tokens], dtype=torch.int32),
        "logprob_T": torch.tensor([p for x in drawn for p in x.logprobs], dtype=torch.float64),
        "truncated_N": torch.tensor([rollout.truncated for rollout in drawn]),
    }


def unpack_drawn(unit: dict[str, Tensor], rows: int) -> list[Drawn]:
    """The rollouts that `pack_drawn` made tensors of."""
    lengths = unit["length_N"].tolist()
    assert len(lengths) == rows  # the key holds every row, the hash every bit
    return [
        Drawn(tokens=tokens_T.tolist(), logprobs=logprob_T.tolist(), truncated=truncated)
        for tokens_T, logprob_T, truncated in zip(
            unit["tokens_T"].split(lengths),
            unit["logprob_T"].split(lengths),
            unit["truncated_N"].tolist(),
            strict=True,
        )
    ]
