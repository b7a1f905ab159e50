"""The evaluation rollouts of a run's ledger: drawn anew at each checkpoint, of the same prompts.

Evaluation prompts are no prompts of the run. Responses are drawn independently at each checkpoint,
so that E_t is independent of the steps it judges. The two ends have further responses to the same
prompts, by which the change is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from entropy_experiments.checkpoints.recorded_run import RecordedRun
from entropy_experiments.config import Config
from entropy_experiments.distributed import current
from entropy_experiments.estimate.level import entropy_level
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.estimate.reward import reward_estimand
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.sums import by_prompt
from entropy_experiments.pipelines.probe_inputs import estimator_options
from entropy_experiments.pipelines.probe_sampling import (
    PromptIds,
    Sampler,
    prompts_of,
    response_ids,
)
from entropy_experiments.pipelines.run_ledger.files import prompt_id
from entropy_experiments.pipelines.run_ledger.states import RunState
from entropy_experiments.pipelines.run_ledger.stored_estimates import pack
from entropy_experiments.pipelines.run_ledger.window import ExplainOptions, Window
from entropy_experiments.pipelines.training_facts import reward_of
from entropy_experiments.results import JSONObject
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.rollout_files import load_update_batch
from entropy_experiments.types import Estimate, Rollouts

FRESH = 4
"""Responses to each prompt at both ends, by which the change is measured."""


class PromptDigests:
    """Prompts by a hash of their tokens: a run has many, and each may be long.

    Examples:
        >>> prompts = PromptDigests()
        >>> prompts.update([(1, 2), (1, 2), (3,)])
        >>> len(prompts), (1, 2) in prompts, (1,) in prompts
        (2, True, False)
    """

    def __init__(self) -> None:
        self._digests: set[int] = set()

    def update(self, prompts: Iterable[PromptIds]) -> None:
        self._digests.update(map(_digest, prompts))

    def __contains__(self, prompt: object, /) -> bool:
        return _digest(cast(PromptIds, prompt)) in self._digests

    def __len__(self) -> int:
        return len(self._digests)


def _digest(prompt: PromptIds) -> int:
    return int(prompt_id(prompt), 16)


@dataclass(kw_only=True, eq=False)
class Evaluations:
    """Draws and rewards evaluation rollouts at each state of a window."""

    config: Config
    run: RecordedRun
    window: Window
    options: ExplainOptions
    _problems: list[Problem] | None = None
    notes: tuple[str, ...] = ()
    """What is to be said about the prompts, once they are chosen."""

    def estimator(self, state: RunState) -> EstimatorOptions:
        """What entropy is meant, with the run's own horizon unless the config has one."""
        horizon = self.config.sampling.max_new_tokens
        horizon = horizon or state.probed.facts["max_completion_length"]
        return replace(estimator_options(self.config, horizon), repackings=0)

    def sampler(self, state: RunState) -> Sampler:
        return Sampler(self.config, state.probed, units=1)

    def draw(self, sampler: Sampler, name: str, responses: int) -> Rollouts:
        """So many responses to each evaluation prompt."""
        rollouts = sampler.generator.generate(
            self._evaluation_prompts(sampler), group=responses, name=name
        )
        return replace(rollouts, behaviour_logprob_NS=None)  # of the very policy that is probed

    def _evaluation_prompts(self, sampler: Sampler) -> list[Problem]:
        """The evaluation prompts: the same at every checkpoint, and none of the run's."""
        if self._problems is None:
            avoid = PromptDigests()
            if not self.options.training_prompts:
                self._add_run_prompts(avoid)
            data = self.config.data
            try:
                self._problems = sampler.problems(
                    "evaluation", data.evaluation_split, data.evaluation_prompts, avoid
                )
            except ValueError as error:
                if self.options.training_prompts:
                    raise
                raise ValueError(
                    f"{error} The prompts of all {len(self.window.steps)} steps are left out; "
                    "--training-prompts evaluates on them, with fresh responses."
                ) from error
            self.notes = tuple(sampler.notes)
        return self._problems

    def _add_run_prompts(self, avoid: PromptDigests) -> None:
        for step in self.window.steps:
            folder = self.run.batch(step)
            assert folder is not None  # find_window looked
            avoid.update(prompts_of(load_update_batch(folder)[0].rollouts))

    def rewards(self, state: RunState, rollouts: Rollouts, responses: int) -> Tensor | None:
        """By the run's reward functions; None where they cannot be called here."""
        facts, problems = state.probed.facts, self._problems
        assert problems is not None  # drawn before
        if facts.values.get("reward_absent") or not facts["reward_functions"]:
            return None
        reward = reward_of(facts, self.config).at_checkpoint(state.probed.checkpoint.path)
        each = [problem for problem in problems for _ in range(responses)]
        texts, ids = list(rollouts.text or ()), response_ids(rollouts)
        # By one rank: a judge that is asked twice may answer twice.
        result = current().broadcast_from_zero(lambda: reward(texts, each, completion_ids=ids))
        return result.total_N

    def fresh(self, state: RunState, sampler: Sampler, estimator: EstimatorOptions) -> JSONObject:
        """Entropy and reward by further responses: what the ledger is measured against."""
        policy = state.probed.policy
        rollouts = self.draw(sampler, f"fresh-{state.step}", FRESH)
        reward_N = self.rewards(state, rollouts, FRESH)
        reward = None
        if reward_N is not None:
            reward = _mean_reward(policy, rollouts, reward_N, estimator)
        level = entropy_level(policy, rollouts, estimator)
        return {"level": pack(level), "reward": pack(reward)}


def _mean_reward(
    policy: SequenceProcessor | Any,
    rollouts: Rollouts,
    reward_N: Tensor,
    estimator: EstimatorOptions,
) -> Estimate:
    reward_N = reward_N.to(rollouts.weight_N)
    return by_prompt(
        lambda top, bottom: top / bottom,
        torch.stack([reward_N, torch.ones_like(reward_N)], 1),
        rollouts,
        reward_estimand(policy, prompts=estimator.prompts, horizon=estimator.horizon),
    )
