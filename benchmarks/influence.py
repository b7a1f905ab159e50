"""Influence of every update rollout: ours beside the earlier method, in passes over E and memory.

    python -m benchmarks.influence [--rounds 5] [--json FILE]

The embedded default: 16 update rollouts, 3 step sizes, 32 evaluation rollouts, LoRA, fp32, SNIS per
token. Both start from the rebuilt step (its parts, P, clip factor) and from nothing else.

    earlier   for each update rollout its own backward, v_i = -P c g_i; then the change along v_i
              and along baseline + v_i, measured at each step size by a whole pass over E; and the
              full step and the baseline. Plainly written below, without any of our shortcuts.
    ours      token_influence (every token, with folds) and influence_matrix (every pair of an
              evaluation and an update rollout, and the lines of the ledger as extra directions).
              First order, so one answer serves every step size.

An *evaluation pass* is one no-grad forward of E, the unit of all columns. Floating-point operations
are counted (torch.utils.flop_counter), so that number is the same on every machine; times are
medians over alternating rounds. Memory is the largest sum of live tensor storages that were made
during the call, as N_U grows under a fixed block budget.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.counting import flops, peak_bytes, timed
from entropy_experiments.attribution.folds import prompt_folds
from entropy_experiments.attribution.matrix import InfluenceMatrix, influence_matrix
from entropy_experiments.attribution.terms import line_directions, rollouts_by_line
from entropy_experiments.attribution.tokens import token_influence
from entropy_experiments.config import load_config
from entropy_experiments.estimate.options import slope_estimand
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.pipelines.probe_inputs import gather
from entropy_experiments.types import Direction, Estimate, Params, Rollouts, Scores, UpdateBatch
from entropy_experiments.update.adamw import adamw_direction
from entropy_experiments.update.gradient import loss_gradient
from entropy_experiments.update.objective import Objective, token_coefficients

N_U, N_E = 16, 32
ETA_FACTORS = (0.25, 0.5, 1.0)
MICROBATCH, FOLDS = 16, 2
BUDGET = 8
"""Evaluation passes that all first-order outputs may cost."""
MEMORY_SIZES = (16, 64, 256)
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What both methods are given."""

    policy: SequenceProcessor
    evaluation: Rollouts
    batch: UpdateBatch
    objective: Objective
    direction: Direction
    scores: Scores
    """Of the update rollouts, a by-product of rebuilding the step."""

    @property
    def etas(self) -> tuple[float, ...]:
        return tuple(factor * self.direction.lr for factor in ETA_FACTORS)


def problems(folder: Path, sizes: tuple[int, ...]) -> dict[int, Problem]:
    """The embedded default with the first N_U of its recorded update rollouts, for each N_U."""
    config = load_config().under(folder).with_overrides([f"data.evaluation_prompts={N_E}"])
    inputs = gather(config, None)
    policy = inputs.policy
    assert isinstance(policy, SequenceProcessor)  # nothing is cut over ranks here
    out = {}
    for size in sizes:
        rows_N = torch.arange(size)
        rollouts = replace(inputs.update.rollouts.take(rows_N), share=1.0, weight_N=None)
        batch = replace(inputs.update.take(rows_N, slice(None)), rollouts=rollouts)
        found = loss_gradient(inputs.policy, batch, inputs.facts.objective, microbatch=MICROBATCH)
        direction = adamw_direction(
            inputs.policy.params,
            found.gradient,
            inputs.optimizer,
            max_grad_norm=inputs.facts["max_grad_norm"] or None,
        )
        out[size] = Problem(
            policy=policy,
            evaluation=inputs.evaluation,
            batch=batch,
            objective=inputs.facts.objective,
            direction=direction,
            scores=found.scores,
        )
    return out


# The earlier method, plainly.


def earlier(problem: Problem) -> dict[str, Any]:
    """Measured changes: [N_U, etas] along v_i and beside the baseline, [etas] full and baseline."""
    policy, evaluation, direction = problem.policy, problem.evaluation, problem.direction
    theta, passes = policy.params, 0

    def entropy_sums(params: Params) -> tuple[Tensor, Tensor]:
        """S_i and H_i of every evaluation rollout: one pass over E."""
        nonlocal passes
        passes += 1
        log_N, h_N = [], []
        with torch.no_grad():
            for start in range(0, N_E, MICROBATCH):
                rows_N = torch.arange(start, min(start + MICROBATCH, N_E))
                scores = policy.score(params, evaluation.take(rows_N))
                log_N.append(scores.logprob_NS.double().sum(1))
                h_N.append(scores.entropy_NS.double().sum(1))
        return torch.cat(log_N), torch.cat(h_N)

    base_log_N, base_h_N = entropy_sums(theta)
    length_N = evaluation.tokens_N.double()
    level = base_h_N.sum() / length_N.sum()

    def moved(v: Params, eta: float) -> float:
        log_N, h_N = entropy_sums({name: t + eta * v[name] for name, t in theta.items()})
        weight_N = (log_N - base_log_N).exp()
        return float((weight_N * h_N).sum() / (weight_N * length_N).sum() - level)

    baseline = direction.only("momentum", "decay").total
    out: dict[str, Any] = {"alone": [], "beside": []}
    out["full"] = [moved(direction.total, eta) for eta in problem.etas]
    out["baseline"] = [moved(baseline, eta) for eta in problem.etas]
    for row in range(len(problem.batch.rollouts)):
        v = own_direction(problem, row)
        both = {name: v[name] + baseline[name] for name in v}
        out["alone"].append([moved(v, eta) for eta in problem.etas])
        out["beside"].append(
            [moved(both, eta) - rest for eta, rest in zip(problem.etas, out["baseline"])]
        )
    return {**out, "passes": passes}


def own_direction(problem: Problem, row: int) -> Params:
    """v_i = -P c g_i, g_i the gradient of rollout i's own terms of the loss."""
    policy, objective, direction = problem.policy, problem.objective, problem.direction
    weights = objective.token_weights(problem.batch)
    rows_N = torch.tensor([row])
    leaves = {name: t.clone().requires_grad_() for name, t in policy.params.items()}
    part = problem.batch.take(rows_N, slice(None))
    scores = policy.score(leaves, part.rollouts)
    objective.weighted(scores, part, weights.take(rows_N, slice(None))).backward()
    assert direction.preconditioner is not None
    out = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        step = -direction.preconditioner[name] * direction.clip_factor * leaf.grad
        out[name] = step.to(leaf.dtype)
    return out


# Ours, and one pass over E.


def ours(
    problem: Problem, *, block_bytes: int = 256 << 20, spent: dict[str, int] | None = None
) -> dict[str, Any]:
    """Tokens, matrix and ledger lines. `spent` is filled with each stage's operations."""
    policy, evaluation, batch = problem.policy, problem.evaluation, problem.batch
    given = (policy, evaluation, policy, batch, problem.objective, problem.direction)
    found: dict[str, Any] = {}

    def stage(name: str, run: Callable[[], Any]) -> None:
        def keep() -> None:
            found[name] = run()

        if spent is None:
            keep()
        else:
            spent[name] = flops(keep)

    stage("base", lambda: one_pass(problem))
    common: dict[str, Any] = {
        "estimand": slope_estimand(policy, form="matched"),
        "microbatch": MICROBATCH,
        "base": found["base"],
        "scores": problem.scores,
    }
    stage("lines", lambda: own_lines(problem))
    stage(
        "matrix",
        lambda: influence_matrix(
            *given,
            **common,
            block_bytes=block_bytes,
            extra=found["lines"],
            fold_N=prompt_folds(evaluation, FOLDS),
        ),
    )
    stage(
        "tokens",
        lambda: token_influence(*given, **common, folds=FOLDS, gradients=found["matrix"].g_K),
    )
    return {**found, "ledger": ledger_lines(problem, found["matrix"])}


def rows_of_lines(problem: Problem) -> dict[str, list[int]] | None:
    return rollouts_by_line(problem.objective, problem.scores, problem.batch)


def own_lines(problem: Problem) -> dict[str, Params]:
    """Directions that are no sums of columns: momentum, decay, lines that cut through rollouts."""
    if rows_of_lines(problem) is not None:
        return {name: problem.direction.parts[name] for name in ("momentum", "decay")}
    return line_directions(
        problem.policy,
        problem.batch,
        problem.objective,
        problem.direction,
        microbatch=MICROBATCH,
    )


def ledger_lines(problem: Problem, matrix: InfluenceMatrix) -> dict[str, Estimate]:
    lines = {str(name): line for name, line in matrix.columns(own_names(matrix)).items()}
    for name, rows in (rows_of_lines(problem) or {}).items():
        if rows:
            lines[name] = matrix.lr * matrix.slope(*rows)
    return lines


def own_names(matrix: InfluenceMatrix) -> list[str]:
    return [column for column in matrix.columns_C if isinstance(column, str)]


def one_pass(problem: Problem) -> Scores:
    policy = problem.policy
    return score_all(policy, policy.params, problem.evaluation, microbatch=MICROBATCH)


METHODS: Mapping[str, Callable[[Problem], Any]] = {
    "pass": one_pass,
    "ours": ours,
    "earlier": earlier,
}


# Comparing.


def stages(problem: Problem) -> dict[str, float]:
    """Where our passes go, in units of one evaluation pass."""
    spent: dict[str, int] = {}
    ours(problem, spent=spent)
    return {name: count / spent["base"] for name, count in spent.items()}


def agreement(problem: Problem, found: dict[str, Any], before: dict[str, Any]) -> dict[str, float]:
    """How far the two methods' numbers are apart, and how the earlier one adds up."""
    tokens, matrix, lr = found["tokens"], found["matrix"], problem.direction.lr
    ledger = sum(line.value for line in found["ledger"].values())
    first_N = matrix.matrix_EN.sum(0)
    smallest, largest = problem.etas[0], problem.etas[-1]
    alone_NK = torch.tensor(before["alone"], dtype=torch.float64)
    slope_N = first_N / lr
    size = float(slope_N.abs().sum())
    full = before["full"][-1]
    summed = before["baseline"][-1] + float(alone_NK[:, -1].sum())
    return {
        "columns against tokens, share of sum |parts|": float(
            (first_N - tokens.rollout_N).abs().sum() / first_N.abs().sum()
        ),
        "sum rule, share of sum |parts|": abs(
            float(first_N.sum()) + sum(tokens.baseline.values()) - tokens.total
        )
        / (float(first_N.abs().sum()) + sum(map(abs, tokens.baseline.values()))),
        "ledger lines against the total": abs(ledger - tokens.total) / abs(tokens.total),
        f"measured at eta {smallest:g} against first order": float(
            (alone_NK[:, 0] / smallest - slope_N).abs().sum() / size
        ),
        f"measured at eta {largest:g} against first order": float(
            (alone_NK[:, -1] / largest - slope_N).abs().sum() / size
        ),
        "full step, measured": full,
        "full step, predicted": tokens.total,
        "baseline + rollouts, measured and summed": summed,
    }


def measure(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        made = problems(Path(folder), (N_U, *MEMORY_SIZES))
    problem = made[N_U]
    found, before = ours(problem), earlier(problem)  # also a warm-up
    counted = {name: flops(lambda: run(problem)) for name, run in METHODS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in range(rounds):
        for name, run in METHODS.items():  # alternating, so that a noisy moment hits all
            seconds[name].append(timed(lambda: run(problem)))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    coefficient = token_coefficients(problem.objective, found["tokens"].scores, problem.batch)
    return {
        "update_rollouts": N_U,
        "evaluation_rollouts": N_E,
        "etas": list(problem.etas),
        "trainable": sum(t.numel() for t in problem.policy.params.values()),
        "tokens_that_count": int((coefficient.logprob_NS != 0).sum()),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "flops_in_passes": {n: round(c / counted["pass"], 2) for n, c in counted.items()},
        "seconds": {name: round(value, 4) for name, value in medians.items()},
        "time_in_passes": {
            name: round(statistics.median(a / b for a, b in zip(values, seconds["pass"])), 2)
            for name, values in seconds.items()
        },
        "passes_counted_by_the_earlier_method": before["passes"],
        "where_our_flops_go": {name: round(x, 2) for name, x in stages(problem).items()},
        "agreement": agreement(problem, found, before),
        "block_bytes": BLOCK_BYTES,
        "peak_mib_without_blocks": round(
            peak_bytes(lambda: ours(made[MEMORY_SIZES[-1]])) / 2**20, 2
        ),
        "peak_mib_by_update_rollouts": {
            size: round(peak_bytes(lambda: ours(made[size], block_bytes=BLOCK_BYTES)) / 2**20, 2)
            for size in MEMORY_SIZES
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the result here too")
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text + "\n")
    used = found["flops_in_passes"]["ours"]
    verdict = "within" if used <= BUDGET else "ABOVE"
    print(f"All first-order outputs: {used} evaluation passes, {verdict} {BUDGET}.")


if __name__ == "__main__":
    main()
