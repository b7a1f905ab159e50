"""What training was like: none of it is in optimizer.pt, all of it decides the step.

Each fact is *given* (the config), *read* (`entropy_probe.json` or a TRL YAML beside the checkpoint)
or *assumed* (TRL's default). The config wins over the files; every assumption is listed in the
verdict, because a wrong one makes a right number about another step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from entropy_experiments.config import Config
from entropy_experiments.tasks.rewards import default_functions
from entropy_experiments.types import OptimizerState
from entropy_experiments.update.objective import Objective

ASSUMED: dict[str, Any] = {
    "loss": "dapo",
    "advantage": "group",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "ratio": "token",
    "beta": 0.0,
    "entropy_coef": 0.0,
    "max_grad_norm": 1.0,
    "max_completion_length": 256,
    "num_iterations": 1,
    "amp_dtype": "float32",
    "temperature": 1.0,
    "dataset_name": "gsm8k_r1_template",
}
"""TRL's GRPO defaults, but for amp_dtype: the probe computes in the precision it says."""


@dataclass(frozen=True, kw_only=True)
class TrainingFacts:
    values: Mapping[str, Any]
    sources: Mapping[str, str]
    read: Mapping[str, Any]
    """What the checkpoint's own files say, whatever the config does."""
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def of_training(self, name: str) -> Any:
        """As training had it, even where the config asks for something else."""
        return self.read.get(name, self.values[name])

    @property
    def assumed(self) -> dict[str, Any]:
        return {name: self.values[name] for name, source in self.sources.items() if not source}

    @property
    def objective(self) -> Objective:
        return Objective(
            loss=self["loss"],
            clip_low=self["clip_low"],
            clip_high=self["clip_high"],
            ratio=self["ratio"],
            beta=self["beta"],
            entropy_coef=self["entropy_coef"],
            max_completion_length=self["max_completion_length"],
        )


def training_facts(
    config: Config, read: Mapping[str, Any], sources: Mapping[str, str]
) -> TrainingFacts:
    """Given over read over assumed."""
    given = {
        **{name: getattr(config.update, name) for name in ASSUMED if hasattr(config.update, name)},
        "temperature": config.generation.temperature,
        "top_p": config.generation.top_p or 1.0,  # the full softmax, whatever training sampled with
        "dataset_name": config.batch_config.dataset_name,
        "reward_functions": config.reward.functions,
        "reward_weights": config.reward.weights,
    }
    read = dict(read)
    notes = list(read.pop("note", ()))
    if given["reward_functions"] is not None:
        read.pop("reward_weights", None)  # weights of other functions
    values, where = {}, {}
    for name in dict.fromkeys([*ASSUMED, *given, *read]):
        if given.get(name) is not None:
            values[name], where[name] = given[name], "the config"
            if name in read and _plain(read[name]) != _plain(given[name]):
                notes.append(
                    f"{name} = {given[name]} here; training had {read[name]} ({sources[name]})"
                )
        elif name in read:
            values[name], where[name] = read[name], sources[name]
        elif name in ASSUMED:
            values[name], where[name] = ASSUMED[name], ""
    if "reward_functions" not in values:
        values["reward_functions"] = list(default_functions(values["dataset_name"]))
        where["reward_functions"] = ""
    return TrainingFacts(values=values, sources=where, read=read, notes=tuple(notes))


def _plain(value: Any) -> Any:
    """Lists of a JSON file and tuples of the config mean the same."""
    return tuple(value) if isinstance(value, (list, tuple)) else value


def with_learning_rate(optimizer: OptimizerState, lr: float) -> OptimizerState:
    """The same optimizer at another rate; groups keep their ratios, where they had rates at all."""
    stored = optimizer.lr
    # Not x * lr / stored throughout: that rounds, and 1e-4 would become another rate.
    groups = tuple(
        replace(group, lr=group.lr * lr / stored if stored and group.lr != stored else lr)
        for group in optimizer.groups
    )
    return replace(optimizer, groups=groups)
