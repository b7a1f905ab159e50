"""What a training run asks and what it pays: the prompts of every step, and TRL's reward functions.

The prompts of a whole run are one list, as long as the run, in an order that follows from the seed:
TRL walks through it once. So a resumed run finds its place by counting, and a longer run begins
like a shorter one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

from entropy_experiments.config.training import TrainingConfig
from entropy_experiments.config.training_batch import BatchPlan
from entropy_experiments.sampling.datasets import Problem, load_problems
from entropy_experiments.sampling.rewards import build_reward, default_functions

MOST_MADE = 4096
"""Problems that are made here, unless dataset_size says more; then they come again."""
ENDLESS = ("countdown", "reasoning_gym:")


@dataclass(frozen=True, kw_only=True)
class Task:
    training: tuple[Problem, ...]
    """Different problems, in the order of their first appearance."""
    held_out: tuple[Problem, ...]
    functions: tuple[str, ...]
    weights: tuple[float, ...] | None
    seed: int

    def sequence(self, prompts: int) -> list[int]:
        """Places in `training` of the prompts of a run, one after the other."""
        rounds = chain.from_iterable(self._round(n) for n in count())
        return list(islice(rounds, prompts))

    def _round(self, number: int) -> Iterator[int]:
        places = range(len(self.training))
        if not number:  # they come in the order of the seed already
            return iter(places)

        def key(place: int) -> bytes:
            name = f"{self.seed} {number} {self.training[place].id}"
            return hashlib.sha256(name.encode()).digest()

        return iter(sorted(places, key=key))

    def facts(self, config: TrainingConfig) -> dict[str, Any]:
        """What `entropy_probe.json` says of the task."""
        facts: dict[str, Any] = {"dataset_name": config.dataset_name}
        notes = []
        if config.dataset_path is not None:
            facts["dataset_path"] = _absolute(config.dataset_path)
        if config.split is not None:
            facts["split"] = config.split
        code = [name for name in self.functions if ":" in name]
        if code:  # a file beside a checkpoint cannot have code imported
            notes.append(
                f"training was rewarded by {', '.join(self.functions)}; data.reward_functions "
                "must name code of one's own"
            )
        else:
            facts["reward_functions"] = list(self.functions)
            if self.weights is not None:
                facts["reward_weights"] = list(self.weights)
        if config.chat_template:
            notes.append("prompts were in the chat template: set data.chat_template: true")
        return {**facts, "note": notes} if notes else facts


def load_task(config: TrainingConfig, plan: BatchPlan, *, tokenizer: Any = None) -> Task:
    needed = plan.prompts_per_generation * plan.generations(config.max_steps)
    size = config.dataset_size
    count = None if size is None else size + config.eval_prompts
    if count is None and config.dataset_name.startswith(ENDLESS):
        count = min(needed, MOST_MADE) + config.eval_prompts
    problems = load_problems(
        config.dataset_name,
        path=config.dataset_path,
        split=config.split,
        count=count,
        seed=config.seed,
        tokenizer=tokenizer,
        chat=config.chat_template,
    )
    least = config.eval_prompts + plan.prompts_per_generation
    if len(problems) < least:
        raise ValueError(
            f"{config.dataset_name} has {len(problems)} different problems; {config.eval_prompts} "
            f"for the probe (eval_prompts) and {plan.prompts_per_generation} for one generation "
            "are needed. Lower eval_prompts or buffer_size, or give a larger dataset."
        )
    functions = config.reward_functions or default_functions(config.dataset_name)
    build_reward(functions, config.reward_weights)  # an unknown one is refused now
    return Task(
        training=tuple(problems[config.eval_prompts :]),
        held_out=tuple(problems[: config.eval_prompts]),
        functions=tuple(functions),
        weights=config.reward_weights,
        seed=config.seed,
    )


def reward_functions(task: Task) -> list[Callable[..., list[float]]]:
    """One for each name, as TRL calls them; it weighs and adds them up."""
    return [_reward(name, task.training) for name in task.functions]


def _reward(name: str, problems: Sequence[Problem]) -> Callable[..., list[float]]:
    reward = build_reward((name,))

    def score(completions: list[str], problem: list[int], **_: Any) -> list[float]:
        chosen = [problems[place] for place in problem]
        return reward(completions, chosen).total_N.tolist()

    score.__name__ = name  # TRL logs it under this name
    return score


def trl_datasets(task: Task, *, prompts: int) -> tuple[Any, Any]:
    """(training, evaluation) as TRL reads them; the second None if nothing is held out."""
    from datasets import Dataset

    problems = task.sequence(prompts)
    training = Dataset.from_dict(
        {"prompt": [task.training[place].prompt for place in problems], "problem": problems}
    )
    if not task.held_out:
        return training, None
    return training, Dataset.from_dict({"prompt": [p.prompt for p in task.held_out]})


def _absolute(path: str) -> str:
    """The offline commands may be run from elsewhere."""
    from pathlib import Path

    return str(Path(path).absolute())
