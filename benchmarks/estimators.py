"""Prediction, measurement and influences on a real model, in forward passes and against plain ways.

    python -m benchmarks.estimators [--rounds 5] [--models smollm2 random] [--json FILE]

4 prompts x 8 responses, as in benchmarks.scoring, are both evaluation and update batch; advantages
are random, the direction is Adam's first step.

    pass        estimate.ratio.score_all: one forward of E without gradients, the unit
    prediction  first_order by jvp, with its standard error
    measurement measured_many at one more eta, the base pass given
    tokens      influence of every token and rollout given g_H: slopes of the scores along P g_H,
                times the loss's coefficients (influence.jacobian.score_slopes)
    (b)         one autograd.grad per rollout on a graph of 8 rollouts, its product with P g_H
    (c)         one pass over E for every rollout's direction and eta: 32 x 3. Four directions are
                timed and scaled up; that is said in the table

CPU time on one thread, the ways in turn, medians over rounds. Where prompts are shared among
rollouts the unit is cheap, too: what is measured is the estimators' own work.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.counting import flops
from benchmarks.scoring import MICROBATCH, _seconds, problem
from entropy_experiments.estimate.first_order import first_order
from entropy_experiments.estimate.measured import measured_many
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.influence.jacobian import score_slopes
from entropy_experiments.policy.scoring import SequenceProcessor
from entropy_experiments.types import Direction, Rollouts

OUT = Path(__file__).parents[1] / "docs" / "benchmarks" / "estimators.json"
ETAS = (1e-4, 2e-4, 4e-4)
TIMED = 4
"""Directions of (c) that are timed; the others are taken to cost the same."""
LIMITS = {"prediction": 3.5, "measurement": 1.1, "b": 4.0, "c": 30.0}


class Work:
    """One model, one batch, all ways."""

    def __init__(self, policy: SequenceProcessor, rollouts: Rollouts) -> None:
        self.policy, self.rollouts = policy, rollouts
        draw = torch.Generator().manual_seed(2)
        self.advantage_N = torch.randn(len(rollouts), generator=draw)
        self.v = {
            name: torch.randn(p.shape, generator=draw).sign() * p.new_tensor(1.0)
            for name, p in policy.params.items()
        }
        self.direction = Direction(parts={"gradient": self.v}, lr=ETAS[0])
        self.base = self.forward()

    def forward(self) -> Any:
        return score_all(self.policy, self.policy.params, self.rollouts, microbatch=MICROBATCH)

    def predict(self) -> Any:
        return first_order(
            self.policy, self.rollouts, self.direction, microbatch=MICROBATCH, repackings=0
        )

    def measure(self) -> Any:
        return measured_many(
            self.policy,
            self.rollouts,
            {"step": self.direction},
            ETAS[:1],
            base=self.base,
            microbatch=MICROBATCH,
            repackings=0,
        )

    def tokens(self) -> torch.Tensor:
        """[N] influences: -sum_k A dl_k along P g_H; every token's own is in the sum."""
        _, slope_K = score_slopes(
            self.policy, self.rollouts, [self.v], mode="jvp", microbatch=MICROBATCH
        )
        return -(self.advantage_N[:, None] * slope_K.logprob_NS[0]).sum(1)

    def one_backward_each(self) -> torch.Tensor:
        """(b)"""
        out = []
        for rows_N in torch.arange(len(self.rollouts)).split(8):
            leaves = {name: p.detach().requires_grad_() for name, p in self.policy.params.items()}
            part = self.rollouts.take(rows_N)
            with torch.enable_grad():
                scores = self.policy.without_sharing().score(leaves, part)
                loss_N = -(self.advantage_N[rows_N, None] * scores.logprob_NS).sum(1)
                for loss in loss_N:
                    grads = torch.autograd.grad(loss, tuple(leaves.values()), retain_graph=True)
                    pairs = zip(grads, self.v.values(), strict=True)
                    out.append(sum((g * v).sum() for g, v in pairs))
        return torch.stack(out).detach()

    def one_pass_each(self, directions: int) -> None:
        """(c), for some of the rollouts' directions, at each eta."""
        for _ in range(directions):
            for eta in ETAS:
                moved = {n: p + eta * self.v[n] for n, p in self.policy.params.items()}
                for rows_N in torch.arange(len(self.rollouts)).split(8):
                    with torch.no_grad():
                        self.policy.without_sharing().score(moved, self.rollouts.take(rows_N))


def examine(policy: SequenceProcessor, rollouts: Rollouts, rounds: int) -> dict[str, Any]:
    work = Work(policy, rollouts)
    ours, theirs = work.tokens(), work.one_backward_each()
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    if error > 1e-3:
        raise RuntimeError(f"ours and (b) differ by {error:.2g}: nothing to compare.")
    ways: Mapping[str, Callable[[], Any]] = {
        "pass": work.forward,
        "prediction": work.predict,
        "measurement": work.measure,
        "tokens": work.tokens,
        "b": work.one_backward_each,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds):
        for name in list(ways) if i % 2 else list(ways)[::-1]:
            seconds[name].append(_seconds(ways[name]))
    some = _seconds(lambda: work.one_pass_each(TIMED))
    median = {name: statistics.median(found) for name, found in seconds.items()}
    whole = some / TIMED * len(rollouts)
    counted = {name: flops(ways[name]) for name in ("pass", "prediction", "measurement", "tokens")}
    return {
        "largest_difference": error,
        "cpu_seconds": {**median, "c": whole, "c_timed": some},
        "spread": {name: [min(found), max(found)] for name, found in seconds.items()},
        "in_passes": {name: median[name] / median["pass"] for name in ways},
        "operations_in_passes": {name: n / counted["pass"] for name, n in counted.items()},
        "b": median["b"] / median["tokens"],
        "c": whole / median["tokens"],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["smollm2", "random"])
    parser.add_argument("--json", type=Path, default=OUT)
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    found: dict[str, Any] = {"rounds": asked.rounds, "torch": torch.__version__, "models": {}}
    for name in asked.models:
        one = examine(*problem(name), asked.rounds)
        found["models"][name] = one
        passes, counted = one["in_passes"], one["operations_in_passes"]
        print(name)
        for kind in ("prediction", "measurement"):
            print(
                f"  {kind}: {passes[kind]:.2f} passes ({counted[kind]:.2f} by operations); limit "
                f"{LIMITS[kind]:g}"
            )
        print(f"  all token influences: {passes['tokens']:.2f} passes")
        print(f"  (b) takes {one['b']:.1f} times as long; target {LIMITS['b']:g}")
        print(f"  (c) takes {one['c']:.0f} times as long; target {LIMITS['c']:g}", flush=True)
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
