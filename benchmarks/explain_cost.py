"""What a step of a run's ledger costs: forward passes, seconds, and memory over the window.

    python -m benchmarks.explain_cost [--rounds 5] [--models embedded smollm2] [--json FILE]

A step of the walk is `attribution.run_ledger.slopes_at` over the evaluation rollouts E (g_H in two
halves, the path's term) and `step_shares` over the update batch U (the loss gradient, every token's
share along the path); sampling, files and the fresh rollouts at the two ends are apart. Its unit is
one forward pass without gradients, `score_all`.

    entropy   both, without rewards, in passes of E + U: at most 8
    reward    what rewards add, in passes of U: at most 6
    tangent   what --tangent adds, in passes of E + U

Counted are floating-point operations, so that a backward and a forward-mode pass are what they
are; timed is CPU time, the ways in turn: the median over rounds with the smallest and the largest.

    embedded  step 13 of the shipped run: 64 prompts x 2 as E, its own 384 rollouts as U
    smollm2   SmolLM2-135M with LoRA, 2 prompts x 8 as E and 2 others as U

Memory is the peak of a process `entropy-probe explain` on the shipped run, page included, for
windows of 5, 10, 20 and 40 steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.counting import flops
from benchmarks.models import GROUP, problem
from benchmarks.tables import alternately, conditions, options, ratio, told, write
from entropy_experiments.attribution.run_ledger import (
    LedgerStep,
    Slopes,
    StepShares,
    columns_of,
    slopes_at,
    step_shares,
)
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.checkpoints.runs import embedded_trajectory
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.sampling.rollout_files import load_update_batch
from entropy_experiments.types import OptimizerState, Params, Rollouts, UpdateBatch
from entropy_experiments.update.objective import Objective
from entropy_experiments.update.optimizer import read_state

LIMITS = {"entropy": 8.0, "reward": 6.0}
WINDOWS = (5, 10, 20, 40)
STEP = 13
EVALUATION_PROMPTS, RESPONSES = 64, 2
MICROBATCH = 32


class Step:
    """One step of the walk, with all that it needs in memory."""

    def __init__(
        self,
        policy: SequenceProcessor,
        evaluation: Rollouts,
        batch: UpdateBatch,
        optimizer: OptimizerState,
    ) -> None:
        self.policy, self.evaluation, self.batch = policy, evaluation, batch
        self.optimizer = optimizer
        self.options = EstimatorOptions(microbatch=MICROBATCH, repackings=0)
        draw = torch.Generator().manual_seed(0)
        self.reward_N = torch.rand(len(evaluation), generator=draw, dtype=torch.float64)
        self.before, self.after = (_beside(policy.params, c) for c in (-1e-4, 1e-4))
        self.made = {
            (rewarded, tangent): self.slopes(rewarded=rewarded, tangent=tangent)
            for rewarded, tangent in ((False, False), (True, False), (False, True))
        }
        self.carried = {key: self._shares(*key, carried=None).carried for key in self.made}

    def forward(self, rollouts: Rollouts) -> Any:
        return score_all(self.policy, self.policy.params, rollouts, microbatch=MICROBATCH)

    def slopes(self, *, rewarded: bool, tangent: bool = False) -> Slopes:
        reward_N = self.reward_N if rewarded else None
        return slopes_at(
            self.policy,
            self.evaluation,
            reward_N,
            self.before,
            self.after,
            self.options,
            tangent=tangent,
        )

    def shares(self, *, rewarded: bool, tangent: bool = False) -> StepShares:
        return self._shares(rewarded, tangent, carried=self.carried[rewarded, tangent])

    def _shares(self, rewarded: bool, tangent: bool, *, carried: Any) -> StepShares:
        slopes = self.made[rewarded, tangent]
        return step_shares(
            LedgerStep(
                trained=self.policy.as_trained(),
                after=self.after,
                batch=self.batch,
                objective=Objective(),
                optimizer=self.optimizer,
                max_grad_norm=1.0,
            ),
            columns_of(slopes, tangent=tangent),
            slopes.gradients,
            carried,
            mode=self.options.mode,
            microbatch=MICROBATCH,
        )

    def ways(self) -> dict[str, Callable[[], Any]]:
        return {
            "pass_E": partial(self.forward, self.evaluation),
            "pass_U": partial(self.forward, self.batch.rollouts),
            "slopes": partial(self.slopes, rewarded=False),
            "slopes_reward": partial(self.slopes, rewarded=True),
            "slopes_tangent": partial(self.slopes, rewarded=False, tangent=True),
            "shares": partial(self.shares, rewarded=False),
            "shares_reward": partial(self.shares, rewarded=True),
            "shares_tangent": partial(self.shares, rewarded=False, tangent=True),
        }


def embedded() -> Step:
    """The shipped run's step, with its own optimizer state."""
    checkpoint = load_checkpoint(embedded_trajectory() / f"checkpoint-{STEP}")
    policy = SequenceProcessor(checkpoint.model)
    batch, _ = load_update_batch(checkpoint.path / "update_batch")
    other, _ = load_update_batch(embedded_trajectory() / f"checkpoint-{STEP + 1}" / "update_batch")
    more, _ = load_update_batch(embedded_trajectory() / f"checkpoint-{STEP + 2}" / "update_batch")
    assert checkpoint.optimizer is not None  # every shipped checkpoint but the last has one
    evaluation = _some([other.rollouts, more.rollouts], EVALUATION_PROMPTS, RESPONSES)
    return Step(policy, evaluation, batch, checkpoint.optimizer)


def smollm2() -> Step:
    """A real model; AdamW after one step, so that its state is there."""
    policy, rollouts = problem("smollm2")
    half = len(rollouts) // 2
    rows_N = torch.arange(len(rollouts))
    evaluation, learned = (_whole(rollouts.take(part)) for part in (rows_N[:half], rows_N[half:]))
    draw = torch.Generator().manual_seed(1)
    advantage_N = torch.randn(len(learned), generator=draw)
    batch = UpdateBatch(
        rollouts=learned,
        advantage_NS=torch.where(learned.response_NS, advantage_N[:, None], 0.0),
    )
    leaves = {name: p.detach().clone().requires_grad_() for name, p in policy.params.items()}
    adamw = torch.optim.AdamW(leaves.values(), lr=1e-4)
    for leaf in leaves.values():
        leaf.grad = torch.full_like(leaf, 1e-3)
    adamw.step()
    state = read_state(adamw, leaves)
    return Step(policy, evaluation, batch, state)


MODELS: Mapping[str, Callable[[], Step]] = {"embedded": embedded, "smollm2": smollm2}


def _some(parts: list[Rollouts], prompts: int, group: int) -> Rollouts:
    """The first responses of the first prompts, drawn by the policy as far as cost goes."""
    rows: list[Rollouts] = []
    for part in parts:
        of_prompt: dict[int, list[int]] = {}
        for row, prompt in enumerate(part.prompt_N.tolist()):
            of_prompt.setdefault(prompt, []).append(row)
        kept = [row for members in of_prompt.values() for row in members[:group]]
        rows.append(replace(part.take(torch.tensor(kept)), behaviour_logprob_NS=None))
    width = max(one.tokens_NS.shape[1] for one in rows)

    def padded(x_NS: Tensor) -> Tensor:
        return torch.nn.functional.pad(x_NS, (0, width - x_NS.shape[1]))

    together = Rollouts(
        tokens_NS=torch.cat([padded(one.tokens_NS) for one in rows]),
        attention_NS=torch.cat([padded(one.attention_NS) for one in rows]),
        response_NS=torch.cat([padded(one.response_NS) for one in rows]),
        prompt_N=torch.cat([one.prompt_N + 10_000 * k for k, one in enumerate(rows)]),
    )
    return _whole(together.take(torch.arange(prompts * group)))


def _whole(part: Rollouts) -> Rollouts:
    return replace(part, weight_N=None, share=1.0)


def _beside(params: Params, step: float) -> dict[str, Tensor]:
    """A neighbour on the run's path: a step in every parameter, as Adam's are."""
    draw = torch.Generator().manual_seed(5)
    return {
        name: theta.detach() + step * torch.randn(theta.shape, generator=draw).sign().to(theta)
        for name, theta in params.items()
    }


def passes(cost: Mapping[str, float]) -> dict[str, float]:
    """In the units of the targets, from operations or seconds of each way."""
    unit = cost["pass_E"] + cost["pass_U"]
    plain = cost["slopes"] + cost["shares"]

    def more(kind: str) -> float:
        return cost[f"slopes_{kind}"] + cost[f"shares_{kind}"] - plain

    return {
        "entropy": plain / unit,
        "of_E": cost["slopes"] / cost["pass_E"],
        "of_U": cost["shares"] / cost["pass_U"],
        "reward": more("reward") / cost["pass_U"],
        "reward_of_E_and_U": more("reward") / unit,
        "tangent": more("tangent") / unit,
    }


def measure(name: str, rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    step = MODELS[name]()
    ways = step.ways()
    counted = {way: flops(run) for way, run in ways.items()}
    seconds = alternately(ways, rounds)
    each = [passes({way: values[i] for way, values in seconds.items()}) for i in range(rounds)]
    timed = {kind: ratio([one[kind] for one in each], [1.0] * rounds) for kind in each[0]}
    return {
        "rollouts": {"E": len(step.evaluation), "U": len(step.batch.rollouts)},
        "operations": counted,
        "passes_by_operations": passes(counted),
        "passes_by_seconds": timed,
        "seconds": seconds,
    }


def peak(window: int) -> dict[str, float]:
    """Of a process that explains so many steps of the shipped run, and draws the page."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["explain", "--from", "0", "--to", str(window), "--out", f"{folder}/out", "--quiet"]
        settings = {"data.evaluation_prompts": 8, "memory.microbatch_size": 32}
        words += [word for key, x in settings.items() for word in ("--set", f"{key}={x}")]
        process = subprocess.Popen(
            [sys.executable, "-m", "entropy_experiments.cli", *words, "--threads", "1"],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"explain of {window} steps ended with status {status}")
    return {"peak_mib": usage.ru_maxrss / 1024, "cpu_seconds": usage.ru_utime + usage.ru_stime}


def table(content: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, one in content["models"].items():
        counted, timed = one["passes_by_operations"], one["passes_by_seconds"]
        lines.append(f"{name}: E {one['rollouts']['E']}, U {one['rollouts']['U']} rollouts")
        for kind in counted:
            limit = f"at most {LIMITS[kind]:g}" if kind in LIMITS else ""
            lines.append(
                f"  {kind:20}{counted[kind]:8.2f} by operations, {told(timed[kind])} by CPU time  "
                f"{limit}"
            )
    for window, one in content.get("windows", {}).items():
        lines.append(
            f"{window:>4} steps: peak {one['peak_mib']:.0f} MiB, {one['cpu_seconds']:.0f} CPU s"
        )
    return lines


def main() -> None:
    parser = options(__doc__, "explain_cost", models=False)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--windows", nargs="*", type=int, default=list(WINDOWS))
    chosen = parser.parse_args()
    content: dict[str, Any] = {
        **conditions(chosen.rounds),
        "limits": LIMITS,
        "group": GROUP,
        "models": {},
        "windows": {},
    }
    for name in chosen.models:
        content["models"][name] = measure(name, chosen.rounds)
        write(chosen.json, content)
    for window in chosen.windows:
        content["windows"][str(window)] = peak(window)
        write(chosen.json, content)
    print("\n".join(table(content)))


if __name__ == "__main__":
    main()
