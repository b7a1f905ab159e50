"""What training was like: none of it is in optimizer.pt, all of it decides the step.

Each fact is *given* (the config), *read* (`entropy_probe.json`, the callback's record or a TRL YAML
beside the checkpoint) or *assumed* (TRL's default). The config wins over the files; every
assumption is listed beside the verdict's headline, because a wrong one makes a right number about
another step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from entropy_experiments.checkpoints.training_record import RECORDED
from entropy_experiments.config import Config
from entropy_experiments.sampling.rewards import Reward, build_reward, default_functions
from entropy_experiments.types import OptimizerState
from entropy_experiments.update.objective import LOSS_SETTINGS, Objective, objective_from

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
REWARDS = ("reward_functions", "reward_weights")
STEP_FACTS = (*LOSS_SETTINGS, "max_grad_norm", "temperature")
OPTIONAL = tuple(name for name in LOSS_SETTINGS if name not in ASSUMED)
"""Options of the loss that are off, or at the loss's own default, unless set."""


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
    def assumed_of_step(self) -> dict[str, Any]:
        """Those that decide how a recorded batch becomes a step."""
        return {name: x for name, x in self.assumed.items() if name in STEP_FACTS}

    def of_rewarded_batch(self) -> TrainingFacts:
        """The same without assumed rewards: the batch has its own, and none is computed."""
        kept = {n: source for n, source in self.sources.items() if source or n not in REWARDS}
        return replace(self, sources=kept)

    @property
    def unfollowed(self) -> tuple[str, ...]:
        """Options of training's loss that the rebuilt step does not have."""
        return tuple(self.values.get("unfollowed") or ())

    @property
    def sampling(self) -> tuple[str, ...]:
        """Options by which training sampled from another distribution than the one probed."""
        cut = self.read.get("top_p")
        options = self.values.get("sampling") or ([] if cut in (None, 1) else [f"top_p = {cut:g}"])
        return tuple(text for text in options if text != f"top_p = {self['top_p']:g}")

    @property
    def chat(self) -> bool:
        """Whether prompts are put in the tokenizer's chat template."""
        return bool(self.values.get("chat_template"))

    @property
    def conversation(self) -> bool:
        """Whether they are messages to rewards too, as they were in training."""
        return self.chat and bool(self.read.get("chat_template"))

    @property
    def asked_otherwise(self) -> tuple[str, ...]:
        """What the policy is asked in another form than in training, in words."""
        if self.chat or not self.read.get("chat_template"):
            return ()
        if self["dataset_name"] == RECORDED:  # in training's own words
            return ()
        return (
            "prompts are asked without the chat template, and training's were conversations "
            "(data.chat_template: true asks as training did)",
        )

    @property
    def objective(self) -> Objective:
        return objective_from(self.values, divisor=self.values.get("divisor"))


def training_facts(
    config: Config, read: Mapping[str, Any], sources: Mapping[str, str]
) -> TrainingFacts:
    """What the config says over what was read, over what is assumed."""
    given = {
        **{
            name: getattr(config.update, name)
            for name in (*ASSUMED, *OPTIONAL)
            if hasattr(config.update, name)
        },
        "temperature": config.sampling.temperature,
        "top_p": config.sampling.top_p or 1.0,  # the full softmax, whatever training sampled with
        "dataset_name": config.data.dataset,
        "chat_template": config.data.chat_template,
        "reward_functions": config.data.reward_functions,
        "reward_weights": config.data.reward_weights,
    }
    own_file = config.data.file is not None
    if own_file and given["dataset_name"] is None and read.get("dataset_name") == RECORDED:
        given["dataset_name"] = "jsonl"  # a file of one's own, instead of the recorded one
    return resolve_facts(given, read, sources)


def resolve_facts(
    given: Mapping[str, Any], read: Mapping[str, Any], sources: Mapping[str, str]
) -> TrainingFacts:
    """`given` over `read` over ASSUMED; None in `given` says nothing."""
    read = dict(read)
    notes = list(read.pop("note", ()))
    if given.get("reward_functions") is not None:
        for name in ("reward_weights", "reward_sources", "reward_absent"):
            read.pop(name, None)  # of other functions
    if read.get("dataset_name") == RECORDED and given.get("dataset_name") is not None:
        for name in ("dataset_path", "E_split", "U_split", "dataset_absent"):
            read.pop(name, None)  # of the recorded prompts
    values, where = {}, {}
    for name in dict.fromkeys([*ASSUMED, *given, *read]):
        if given.get(name) is not None:
            values[name], where[name] = given[name], "the config"
            noted = name == "top_p" and read.get("sampling")  # by `sampling_notes`
            if name in read and _plain(read[name]) != _plain(given[name]) and not noted:
                notes.append(
                    f"{name} = {given[name]} here; training had {read[name]} ({sources[name]})"
                )
        elif name in read:
            values[name], where[name] = read[name], sources[name]
        elif name in ASSUMED:
            values[name], where[name] = ASSUMED[name], ""
    if values["beta"] and "kl_ratio" not in values:
        values["kl_ratio"], where["kl_ratio"] = True, ""  # TRL's default, which beta = 0 hides
    if "reward_absent" in values:
        values["reward_functions"], where["reward_functions"] = [], where["reward_absent"]
    if "reward_functions" not in values:
        values["reward_functions"] = list(default_functions(values["dataset_name"]))
        where["reward_functions"] = ""
    facts = TrainingFacts(values=values, sources=where, read=read, notes=tuple(notes))
    return replace(facts, notes=(*notes, *sampling_notes(facts)))


def refuse_unrecorded(facts: TrainingFacts) -> None:
    """Where a run recorded itself but not its prompts, no other ones are taken instead."""
    absent = facts.values.get("dataset_absent")
    if absent:
        raise ValueError(
            f"The run's own prompts are not in its record: {absent}. Name prompts: "
            "data.dataset, and data.file for a file."
        )


def sampling_notes(facts: TrainingFacts) -> tuple[str, ...]:
    """What training's sampling had besides the temperature, which nothing here follows."""
    options = facts.sampling
    if not options or not facts.values.get("sampling"):  # top_p alone has its note
        return ()
    kept = "the full softmax" if facts["top_p"] == 1 else f"the softmax cut at {facts['top_p']:g}"
    return (
        f"training sampled with {', '.join(options)}; entropy here is of {kept} at temperature "
        f"{facts['temperature']:g} (sampling.top_p sets another)",
    )


def reward_of(facts: TrainingFacts, config: Config) -> Reward:
    """Training's own reward, or what the config names instead."""
    absent = facts.values.get("reward_absent")
    if absent:
        raise ValueError(
            f"The run's own reward cannot be called here: {absent}. Name one in a file of its "
            "own, which no training script is: data.reward_functions (entropy-probe evaluate: "
            "--reward)."
        )
    return build_reward(
        facts["reward_functions"],
        facts.values.get("reward_weights"),
        sources=facts.values.get("reward_sources"),
        seconds=config.data.reward_seconds,
    )


def _plain(value: Any) -> Any:
    """Lists of a JSON file and tuples of the config mean the same."""
    return tuple(value) if isinstance(value, (list, tuple)) else value


def with_learning_rate(optimizer: OptimizerState, lr: float) -> OptimizerState:
    """The same optimizer at another rate; groups keep their ratios, where they had rates at all."""
    stored = optimizer.lr
    others = [group.lr for group in optimizer.groups if group.lr != stored]
    if not stored and others:
        raise ValueError(
            f"update.lr is {lr:g}, and the optimizer's groups have the rates 0 and {others[0]:g}: "
            "there is no ratio to keep. Leave update.lr out, or use a checkpoint whose first group "
            "has a rate."
        )
    # Not x * lr / stored throughout: that rounds, and 1e-4 would become another rate.
    groups = tuple(
        replace(group, lr=group.lr * lr / stored if stored and group.lr != stored else lr)
        for group in optimizer.groups
    )
    return replace(optimizer, groups=groups)
