"""How many tasks are solved, before and after refinement.

A task is solved when every test output is right in size and in every cell, with one attempt. Tasks
are the independent draws, so the Wilson interval counts tasks:

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n),   z = 1.96

Refinement in evaluation is the policy's centre, a = c tanh(mu(s)): no noise, the same every time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from arc_refine.agent import AgentOutput, predictions
from arc_refine.batch import Batch, BatchInputs
from arc_refine.data import Episode
from arc_refine.reward import cell_accuracy
from arc_refine.step import Training, embed, run_agent

Z95 = 1.959963984540054


def wilson(successes: int, n: int, z: float = Z95) -> tuple[float, float]:
    """The 95 % interval of a share; honest also for 0 of n."""
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"got {successes} of {n}, expected 0 <= successes <= n and n >= 1.")
    p, zz = successes / n, z * z / n
    middle = (p + zz / 2) / (1 + zz)
    half = z * math.sqrt(p * (1 - p) / n + zz / (4 * n)) / (1 + zz)
    # 0 of n begins at 0 and n of n ends at 1 exactly, which rounding would miss
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    return low, 1.0 if successes == n else min(1.0, middle + half)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One test output of one task."""

    task_id: str
    exact_before: bool
    exact_after: bool
    size_right: bool
    cells_before: float
    cells_after: float
    prediction_before: np.ndarray
    prediction_after: np.ndarray
    episode: Episode


@torch.no_grad()
def predict(training: Training, inputs: BatchInputs) -> tuple[AgentOutput, AgentOutput]:
    """(without refinement, with it); the same object twice when there is no policy."""
    prompt_BE = embed(training, inputs)
    before = run_agent(training, inputs, prompt_BE)
    policy = training.networks.policy
    if policy is None:
        return before, before
    mean_BE, _ = policy.moments(policy.state(prompt_BE, inputs.features_BF))
    return before, run_agent(training, inputs, prompt_BE + policy.squash(mean_BE))


def evaluate(
    training: Training,
    episodes: Sequence[Episode],
    make_batch: Callable[[Sequence[Episode]], Batch],
    *,
    max_batches: int | None = None,
) -> list[Outcome]:
    """In eval mode; networks are put back into the mode they came in."""
    size, networks = training.config.batch_size, training.networks
    # of like sizes together: one large grid would blow up its whole batch
    order = sorted(episodes, key=lambda e: (e.inputs.query.size, e.inputs.task_id))
    chunks = [order[i : i + size] for i in range(0, len(order), size)]
    if max_batches is not None and len(chunks) > max_batches:
        # spread over the sizes, not the smallest alone
        picked = np.linspace(0, len(chunks) - 1, max_batches).round().astype(int)
        chunks = [chunks[i] for i in sorted(set(picked.tolist()))]
    modes = {name: module.training for name, module in networks.modules().items()}
    networks.train(False)
    try:
        return [o for chunk in chunks for o in _outcomes(training, make_batch(chunk), chunk)]
    finally:
        for name, module in networks.modules().items():
            module.train(modes[name])


def _outcomes(training: Training, batch: Batch, episodes: Sequence[Episode]) -> list[Outcome]:
    before, after = predict(training, batch.inputs)
    grids = [predictions(output, batch.inputs) for output in (before, after)]
    cells = [cell_accuracy(output, batch.targets).tolist() for output in (before, after)]
    return [
        Outcome(
            task_id=episode.inputs.task_id,
            exact_before=np.array_equal(grids[0][b], episode.target),
            exact_after=np.array_equal(grids[1][b], episode.target),
            size_right=grids[1][b].shape == episode.target.shape,
            cells_before=cells[0][b],
            cells_after=cells[1][b],
            prediction_before=grids[0][b],
            prediction_after=grids[1][b],
            episode=episode,
        )
        for b, episode in enumerate(episodes)
    ]


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Numbers for a row: tasks solved with interval, cell accuracy, sizes."""
    if not outcomes:
        raise ValueError("There are no test outputs to evaluate, expected at least one.")
    tasks: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        tasks.setdefault(outcome.task_id, []).append(outcome)
    numbers: dict[str, Any] = {"tasks": len(tasks), "outputs": len(outcomes)}
    for when in ("before", "after"):
        solved = sum(all(getattr(o, f"exact_{when}") for o in mine) for mine in tasks.values())
        numbers[f"solved_{when}"] = solved
        numbers[f"exact_{when}"] = solved / len(tasks)
        numbers[f"exact_{when}_wilson"] = list(wilson(solved, len(tasks)))
        cells = [getattr(o, f"cells_{when}") for o in outcomes]
        numbers[f"cell_accuracy_{when}"] = float(np.mean(cells))
    numbers["size_accuracy"] = float(np.mean([o.size_right for o in outcomes]))
    return numbers


def sentence(numbers: dict[str, Any]) -> str:
    """The summary in words."""

    def share(when: str) -> str:
        low, high = numbers[f"exact_{when}_wilson"]
        return (
            f"{numbers[f'solved_{when}']} of {numbers['tasks']} tasks solved "
            f"(95 % interval {100 * low:.1f} to {100 * high:.1f} %), "
            f"cells {100 * numbers[f'cell_accuracy_{when}']:.1f} %"
        )

    return f"before refinement: {share('before')}\nafter refinement:  {share('after')}"
