"""A whole run: every recorded step predicted and measured, and fresh rollouts at each checkpoint.

The fresh line needs no weights and no derivative: it is the check on the two others. Because every
checkpoint is asked the same prompts, sums and differences along the run have paired intervals.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch

from entropy_experiments.artifacts import write_whole
from entropy_experiments.checkpoints.runs import checkpoints_by_count, embedded_trajectory
from entropy_experiments.config import Config
from entropy_experiments.estimate.first_order import first_order
from entropy_experiments.estimate.level import entropy_level, within_entropy
from entropy_experiments.estimate.measured import even_part, measured_many
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.pipelines.probe_inputs import estimator_options, gather
from entropy_experiments.pipelines.probe_sampling import (
    PromptIds,
    Sampler,
    open_checkpoint,
    prompts_of,
)
from entropy_experiments.report.notebook import trajectory_html
from entropy_experiments.results import CHANGES, TOTALS, TRAJECTORY, numbers
from entropy_experiments.sampling.rollout_files import load_update_batch
from entropy_experiments.types import Estimate
from entropy_experiments.types.estimate import combine

Job = tuple[Config, Path, int, set[PromptIds]]


@dataclass(frozen=True, kw_only=True, eq=False)
class TrajectoryStep:
    """One checkpoint: its entropy, and what the recorded update after it does."""

    name: str
    step: int
    level: Estimate
    predicted: Estimate
    second_order: Estimate
    """With the curvature: 2 eta slope + Delta(-eta), still before the step is made."""
    measured: Estimate
    reward: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    steps: tuple[TrajectoryStep, ...]
    last: Estimate
    """Entropy after the last update, where the checkpoint after it was kept."""

    @property
    def predicted(self) -> Estimate:
        return combine([(1.0, step.predicted) for step in self.steps])

    @property
    def second_order(self) -> Estimate:
        return combine([(1.0, step.second_order) for step in self.steps])

    @property
    def measured(self) -> Estimate:
        return combine([(1.0, step.measured) for step in self.steps])

    @property
    def fresh(self) -> Estimate:
        """Last minus first, each on rollouts of its own: slow, and obviously right."""
        return self.last - self.steps[0].level

    def _repr_html_(self) -> str:
        total = {name: numbers(getattr(self, name)) for name in TOTALS}
        return trajectory_html(total, self.steps[0].step, self.steps[-1].step + 1)


def probe_trajectory(
    config: Config,
    folder: str | Path | None = None,
    *,
    steps: slice = slice(None),
    workers: int = 1,
    say: Callable[[TrajectoryStep], None] | None = None,
) -> Trajectory:
    """Every step of a run whose checkpoints are consecutive and whose batches were recorded.

    Steps do not depend on each other: `workers` processes of one thread each share them, which
    suits models too small to keep several threads busy.

    Args:
        config: How rollouts are drawn and entropy is estimated.
        folder: Of the run; None: the embedded one.
        steps: A part of the checkpoints.
        workers: Processes.
        say: Called with each step as it is done.

    Returns:
        Every step, and the entropy after the last one.

    Raises:
        ValueError: If there are no two consecutive checkpoints.

    Examples:
        >>> run = probe_trajectory(parse_config({}), steps=slice(8, 11))  # doctest: +SKIP
        >>> print(run.predicted, run.measured, run.fresh)  # doctest: +SKIP
        >>> probe_trajectory(parse_config({}), steps=slice(8, 9))
        Traceback (most recent call last):
        ValueError: ... expected two or more consecutive steps ...
    """
    folder = embedded_trajectory() if folder is None else Path(folder)
    counted = list(checkpoints_by_count(folder).items())[steps]
    numbers, paths = [count for count, _ in counted], [path for _, path in counted]
    if len(paths) < 2 or numbers != list(range(numbers[0], numbers[0] + len(paths))):
        raise ValueError(
            f"{folder} has the checkpoints {numbers}; expected two or more consecutive steps "
            "(folders checkpoint-N or step_N), since changes are summed along the run."
        )
    config = config.with_overrides(["data.update_rollouts=recorded"])
    # The same prompts at every checkpoint, so that changes along the run are paired.
    avoid = set[PromptIds]().union(*(_update_prompts(path) for path in paths[:-1]))
    jobs = [(config, path, number, avoid) for path, number in zip(paths[:-1], numbers)]
    done: list[TrajectoryStep] = []
    with _pool(workers) as probed:
        for step in probed(jobs):
            done.append(step)
            if say is not None:
                say(step)
    return Trajectory(steps=tuple(done), last=fresh_level(config, paths[-1], avoid))


@contextmanager
def _pool(workers: int) -> Iterator[Callable[[list[Job]], Iterable[TrajectoryStep]]]:
    """Something that probes jobs and gives their steps in order."""
    if workers <= 1:
        yield lambda jobs: (_probed(*job) for job in jobs)
        return
    # spawn: a forked child of a threaded parent may hang.
    with ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        yield lambda jobs: pool.map(_probed, *zip(*jobs))


def _probed(config: Config, path: Path, number: int, avoid: set[PromptIds]) -> TrajectoryStep:
    inputs = gather(config, path, avoid=avoid, units=1)  # a step is done in a second or two
    policy, rollouts = inputs.policy, inputs.evaluation
    options = replace(inputs.estimator, repackings=0)
    direction, _ = inputs.step()
    base = score_all(policy, policy.params, rollouts, microbatch=options.forward_size)
    predicted = inputs.lr * first_order(policy, rollouts, direction, options, base=base)
    ahead, behind = measured_many(
        policy, rollouts, {"step": direction}, [inputs.lr, -inputs.lr], options, base=base
    ).values()
    second_order = predicted + even_part(predicted, behind)
    level = entropy_level(policy, rollouts, options, base=base)
    reward_N = inputs.update.reward_N
    return TrajectoryStep(
        name=inputs.checkpoint.name,
        step=number,
        level=level,
        predicted=within_entropy(predicted, level),
        second_order=within_entropy(second_order, level),
        measured=ahead,
        reward=None if reward_N is None else float(reward_N.double().mean()),
    )


def fresh_level(config: Config, path: Path, avoid: set[PromptIds]) -> Estimate:
    """Entropy of one checkpoint by rollouts of its own; no update is looked for."""
    sampler = Sampler(config, open_checkpoint(config, path), units=1)
    return entropy_level(
        sampler.policy, sampler.evaluation(avoid), estimator_options(config, sampler.horizon)
    )


def _update_prompts(path: Path) -> set[PromptIds]:
    batch, _ = load_update_batch(path / "update_batch")
    return prompts_of(batch.rollouts)


def write_trajectory(run: Trajectory, path: str | Path) -> Path:
    """trajectory.json: each step, the sums up to it, and the totals.

    Sums have intervals of their own: steps share their prompts, so their errors do not just add up.
    """
    path, rows = Path(path), []
    for at, step in enumerate(run.steps, start=1):
        so_far = run.steps[:at]
        rows.append(
            {
                "step": step.step,
                "level": numbers(step.level),
                **{name: numbers(getattr(step, name)) for name in CHANGES},
                **{
                    f"{name}_sum": numbers(combine([(1.0, getattr(s, name)) for s in so_far]))
                    for name in CHANGES
                },
                "reward": step.reward,
            }
        )
    content = {
        **TRAJECTORY.stamp,
        "unit": run.last.estimand.unit,
        "steps": rows,
        "last": numbers(run.last),
        "total": {name: numbers(getattr(run, name)) for name in TOTALS},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1, allow_nan=False).encode())
    return path
