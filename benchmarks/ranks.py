"""What a second process is worth: two ranks of one thread each beside one rank of one thread.

    python -m benchmarks.ranks [--rounds 5] [--model random] [--prompts 8] [--json FILE]

The same work through numerics.ranks.across, 8 prompts x 8 rollouts in microbatches of 8: score_all,
first_order by jvp, measured_many at one eta with that pass as its base.

Both processes load the model and stay. In a round rank 0 does all of it alone, while rank 1 sleeps
at a barrier; then both share it (or the other way round, in turn). Wall clock from one barrier to
the next, on rank 0: it needs two idle cores. What both ways gave must agree to 1e-12.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.models import problem
from benchmarks.tables import MODELS, alternately, conditions, options, ratio, spread, told, write
from entropy_experiments.distributed import ALONE, Ranks, across
from entropy_experiments.estimate.first_order import first_order
from entropy_experiments.estimate.measured import measured_many
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.types import Direction, Rollouts

MICROBATCH, ETA = 8, 1e-4
TARGET = 1.6
AGREEMENT = 1e-12
PATIENCE = timedelta(hours=1)
"""Of a rank that waits for the other at a barrier: a busy machine is no failure."""


def work(policy: SequenceProcessor, rollouts: Rollouts, direction: Direction) -> list[float]:
    """All of it, as numbers to compare."""
    options: dict[str, Any] = {"microbatch": MICROBATCH, "repackings": 0}
    base = score_all(policy, policy.params, rollouts, microbatch=MICROBATCH)
    predicted = first_order(policy, rollouts, direction, **options)
    (moved,) = measured_many(
        policy, rollouts, {"step": direction}, [ETA], base=base, **options
    ).values()
    ends = [float(x_NS.sum()) for x_NS in base]
    both = (predicted, moved)
    return [*ends, *(e.value for e in both), *(float(e.stderr or 0.0) for e in both)]


def compared(alone: Sequence[float], shared: Sequence[float]) -> float:
    """The largest relative difference; too large a one is an error."""
    gap = max(abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in zip(alone, shared, strict=True))
    if not gap <= AGREEMENT:
        raise RuntimeError(
            f"One rank and two differ by {gap:.2g} (relative); expected at most {AGREEMENT:g}: "
            "nothing to compare."
        )
    return gap


def on_a_rank(rank: int, folder: str, model: str, prompts: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=PATIENCE
    )
    try:
        found = measure(model, prompts, rounds)
        if rank == 0:
            write(Path(folder) / "found.json", found)
    finally:
        dist.destroy_process_group()


def measure(model: str, prompts: int, rounds: int) -> dict[str, Any]:
    """On both ranks at once; the times are those of rank 0."""
    policy, rollouts = problem(model, prompts)
    draw = torch.Generator().manual_seed(2)
    v = {name: torch.randn(p.shape, generator=draw).sign() for name, p in policy.params.items()}
    direction = Direction(parts={"gradient": v}, lr=ETA)
    everyone, answers = Ranks.all(), {}

    def alone() -> None:
        if everyone.first:
            with across(ALONE):
                answers["one"] = work(policy, rollouts, direction)
        dist.barrier()

    def shared() -> None:
        with across(everyone):
            answers["two"] = work(policy, rollouts, direction)
        dist.barrier()

    ways = {"one": alone, "two": shared}
    alternately(ways, 1, time.perf_counter)  # warm
    taken = alternately(ways, rounds, time.perf_counter)
    return {
        "model": model,
        "rollouts": len(rollouts),
        "microbatches": len(list(rollouts.split(MICROBATCH, policy))),
        "largest_difference": compared(answers["one"], answers["two"]) if everyone.first else 0.0,
        "wall_seconds": {name: spread(found) for name, found in taken.items()},
        "speedup": ratio(taken["one"], taken["two"]),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = options(__doc__, "ranks", models=False)
    parser.add_argument("--model", choices=MODELS, default="random")
    parser.add_argument("--prompts", type=int, default=8, help="of 8 rollouts each")
    asked = parser.parse_args(argv)
    found: dict[str, Any] = {**conditions(asked.rounds), "targets": {"speedup": TARGET}}
    with tempfile.TemporaryDirectory() as folder:
        spawn(on_a_rank, (folder, asked.model, asked.prompts, asked.rounds), nprocs=2)
        found |= json.loads((Path(folder) / "found.json").read_text())
    for name, times in found["wall_seconds"].items():
        print(f"{name} rank(s) of one thread: {told(times)} s")
    print(f"{told(found['speedup'])} times as fast; target {TARGET:g}")
    write(asked.json, found)


if __name__ == "__main__":
    main()
