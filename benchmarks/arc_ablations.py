"""What each part of the ARC trainer is worth: five arms, three seeds, held-out tasks.

    python -m benchmarks.arc_ablations --minutes 15 [--steps N] [--out JSON] [--markdown FILE]

Arms differ from `rl` (policy by REINFORCE, language model trained, own text) in one thing each:
refine off, refine pathwise, language model frozen, text shuffled across tasks. Within a seed all
arms have the same split, first weights, batches and number of steps. The number of steps is what
the budget allows: the dearest arm's step is timed first, on one thread. Everything is written after
every run; started again with the same --out, finished runs are kept.

Intervals are Wilson's, of one seed's held-out tasks. Seeds share tasks, so they are not pooled.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from arc_refine.config import TrainConfig
from arc_refine.episodes import RunData, generator, load_data
from arc_refine.evaluate import evaluate, summary
from arc_refine.metrics import versions, write_whole
from arc_refine.step import Training, train_step
from arc_refine.train import begin

ARMS: dict[str, dict[str, Any]] = {
    "rl": {},
    "refine off": {"refine": "off"},
    "refine pathwise": {"refine": "pathwise"},
    "LM frozen": {"lm_train": "none"},
    "text shuffled": {"shuffle_text": True},
}
ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "benchmarks" / "arc_ablations.json"
TABLE = ROOT / "build" / "arc_ablations.md"
SHARE = 0.85
"""Of the budget, for what is foreseen; the rest for what is not."""


def configuration(arm: str, seed: int, max_side: int) -> TrainConfig:
    return TrainConfig(seed=seed, max_side=max_side, curriculum=False, epochs=10**6, **ARMS[arm])


class Run:
    """One arm with one seed."""

    def __init__(self, arm: str, seed: int, max_side: int) -> None:
        config = configuration(arm, seed, max_side)
        self.data: RunData = load_data(config)
        self.training: Training = begin(config)
        self.training.networks.train()

    def train(self, steps: int) -> list[dict[str, Any]]:
        rows, per_epoch = [], self.data.batches()
        order = self.data.order(0)
        for step in range(steps):
            epoch, number = divmod(step, per_epoch)
            if number == 0:
                order = self.data.order(epoch)
            episodes = self.data.episodes(epoch, number, order)
            batch = self.data.batch(episodes, epoch, number)
            draw = generator("refine", self.training.config.seed, epoch, number)
            rows.append(train_step(self.training, batch, draw))
        return rows

    def held_out(self) -> dict[str, Any]:
        episodes = self.data.held_out_episodes()
        return summary(evaluate(self.training, episodes, lambda c: self.data.batch(c, -1)))


def affordable(minutes: float, runs: int, max_side: int) -> int:
    """Steps per run that fit into the budget, from a trial of the dearest arm."""
    run = Run("rl", 0, max_side)
    run.train(2)  # the first steps are slower
    began = time.perf_counter()
    run.train(6)
    step = (time.perf_counter() - began) / 6
    began = time.perf_counter()
    run.held_out()
    aside = time.perf_counter() - began + 3.0  # loading
    steps = int((SHARE * 60 * minutes / runs - aside) / step)
    if steps < 1:
        raise SystemExit(
            f"--minutes {minutes:g} leaves no time to train: a step takes {step:.2f} s, an "
            f"evaluation {aside:.1f} s, and there are {runs} runs. Give more minutes."
        )
    return steps


def measure(arm: str, seed: int, steps: int, max_side: int) -> dict[str, Any]:
    began = time.perf_counter()
    run = Run(arm, seed, max_side)
    rows = run.train(steps)
    tail = rows[-max(1, len(rows) // 5) :]
    return {
        "arm": arm,
        "seed": seed,
        "steps": steps,
        **run.held_out(),
        "last_loss": mean(row["loss"] for row in tail),
        "last_training_cell_accuracy": mean(row["accuracy_after"] for row in tail),
        "last_reward": mean(row["reward_mean"] for row in tail)
        if "reward_mean" in tail[0]
        else None,
        "seconds": time.perf_counter() - began,
    }


def markdown(found: dict[str, Any]) -> str:
    """The table for LOG.md."""
    lines = [
        f"{found['steps']} steps per run, batches of {found['batch_size']}, tasks with grids up to "
        f"{found['max_side']} a side; one attempt per task, held-out tasks, after refinement.",
        "",
        "| arm | seed | solved | 95 % (Wilson) | cells before | cells after | sizes | last loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in found["runs"]:
        low, high = run["exact_after_wilson"]
        lines.append(
            f"| {run['arm']} | {run['seed']} | {run['solved_after']} of {run['tasks']} "
            f"| {100 * low:.1f} to {100 * high:.1f} % | {100 * run['cell_accuracy_before']:.1f} % "
            f"| {100 * run['cell_accuracy_after']:.1f} % | {100 * run['size_accuracy']:.1f} % "
            f"| {run['last_loss']:.3f} |"
        )
    lines += ["", "Cells after refinement, less those of `rl` with the same seed (points):", ""]
    lines += ["| arm | each seed | mean |", "|---|---|---|"]
    rl = {r["seed"]: r["cell_accuracy_after"] for r in found["runs"] if r["arm"] == "rl"}
    for arm in list(ARMS)[1:]:
        mine = [r for r in found["runs"] if r["arm"] == arm and r["seed"] in rl]
        gaps = [100 * (r["cell_accuracy_after"] - rl[r["seed"]]) for r in mine]
        if gaps:
            each = ", ".join(f"{gap:+.2f}" for gap in gaps)
            lines.append(f"| {arm} | {each} | {mean(gaps):+.2f} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=15.0, help="budget of the whole set")
    parser.add_argument("--steps", type=int, help="steps per run, in place of the budget")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-side", type=int, default=12)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--out", type=Path, default=OUT, help="JSON")
    parser.add_argument("--markdown", type=Path, default=TABLE, help="the table")
    asked = parser.parse_args(argv)

    torch.set_num_threads(1)
    wanted = [(arm, seed) for seed in range(asked.seeds) for arm in asked.arms]
    found = json.loads(asked.out.read_text("utf-8")) if asked.out.is_file() else None
    if found is not None and (
        found["max_side"] != asked.max_side or asked.steps not in (None, found["steps"])
    ):
        raise SystemExit(
            f"{asked.out} has runs of other settings. Remove it, or give another --out."
        )
    if found is None:
        steps = asked.steps or affordable(asked.minutes, len(wanted), asked.max_side)
        size = TrainConfig().batch_size
        found = {"steps": steps, "max_side": asked.max_side, "batch_size": size}
        found |= {"minutes": asked.minutes, "versions": versions(), "runs": []}
    done = {(run["arm"], run["seed"]) for run in found["runs"]}
    print(f"{found['steps']} steps per run, {len(wanted) - len(done & set(wanted))} runs to make")
    for file in (asked.out, asked.markdown):
        file.parent.mkdir(parents=True, exist_ok=True)
    for arm, seed in wanted:
        if (arm, seed) in done:
            continue
        run = measure(arm, seed, found["steps"], asked.max_side)
        found["runs"].append(run)
        write_whole(asked.out, json.dumps(found, indent=2, allow_nan=False) + "\n")
        write_whole(asked.markdown, markdown(found))
        print(
            f"{arm:<16} seed {seed}  {run['solved_after']} of {run['tasks']} solved, cells "
            f"{run['cell_accuracy_before']:.3f} -> {run['cell_accuracy_after']:.3f}, "
            f"loss {run['last_loss']:.3f}, {run['seconds']:.0f} s",
            flush=True,
        )
    print(f"\n{markdown(found)}\n{asked.out}\n{asked.markdown}")


if __name__ == "__main__":
    main()
