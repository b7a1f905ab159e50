"""What is asked of an evaluation, checked as far as files tell before anything is loaded.

All checkpoints get the same prompts, the same seeds and the same distribution (temperature, top_p,
length limit), so that differences between them are paired. What the checkpoints' own files say
about task and distribution must therefore agree, unless the command or the config says it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from entropy_experiments.artifacts import sha256
from entropy_experiments.checkpoints.adapter import read_adapter_config
from entropy_experiments.checkpoints.base import (
    check_safetensors,
    deciding_files,
    find_base,
)
from entropy_experiments.checkpoints.layout import (
    ADAPTER_CONFIG,
    MODEL_CONFIG,
    Layout,
    find_checkpoint,
)
from entropy_experiments.checkpoints.runs import (
    checkpoints_by_step,
    embedded_trajectory,
    packaged_checkpoint,
)
from entropy_experiments.checkpoints.stored_weights import carries_base
from entropy_experiments.checkpoints.training_facts import read_facts
from entropy_experiments.checkpoints.training_record import RECORDED, read_record
from entropy_experiments.config import Config
from entropy_experiments.pipelines.training_facts import (
    TrainingFacts,
    refuse_unrecorded,
    reward_of,
    training_facts,
)
from entropy_experiments.results import EvaluationSettings
from entropy_experiments.sampling.datasets import MADE, MADE_SPLITS, Problem, load_problems
from entropy_experiments.sampling.rewards import Reward, build_reward, default_functions
from entropy_experiments.types import Estimand

SCHEMA = 2
"""Of rows and settings: numbers of another one are made again."""
SHARED = ("dataset_name", "dataset_path", "split", "temperature", "max_completion_length", "stop")
"""Facts that must be the same for all checkpoints."""
KEY_OF = {
    "dataset_name": "--task NAME_OR_JSONL",
    "dataset_path": "--data FILE",
    "split": "--split NAME",
    "temperature": "--set sampling.temperature=1.0",
    "max_completion_length": "--set sampling.max_new_tokens=256",
    "stop": '--set "sampling.stop=[...]"',
}
DEFAULT_PROMPTS = 64
DEFAULT_COUNT = 4
"""Checkpoints of the embedded run that are evaluated when none is named."""


MOST, MOST_RESPONSES = 100_000, 10**7
"""Problems, and responses to each: more was a slip of the hand."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """Options of an evaluation that the config has no key for.

    Args:
        samples: Responses per prompt.
        prompts: How many prompts.
        ks: k of pass@k; None: those of 1, 4, 8 that `samples` allows.
        threshold: Nats above which a token counts as drawn in doubt; ln 2 is a fair coin's.
        rewards: What makes a response pass; None: what the task is usually judged by.

    Raises:
        ValueError: If a number is out of range.

    Examples:
        >>> EvaluationRequest(samples=4).k
        (1, 4)
    """

    samples: int = 8
    prompts: int = DEFAULT_PROMPTS
    ks: tuple[int, ...] | None = None
    threshold: float = 0.6931471805599453
    rewards: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "prompts"):
            if not 1 <= getattr(self, name) <= MOST:
                raise ValueError(f"--{name} is {getattr(self, name)}; expected 1 to {MOST}.")
        if self.prompts * self.samples > MOST_RESPONSES:
            raise ValueError(
                f"--prompts {self.prompts} x --samples {self.samples} are "
                f"{self.prompts * self.samples:.3g} responses a checkpoint; expected at most "
                f"{MOST_RESPONSES:.0e}. Lower one of them."
            )
        if not self.threshold >= 0:
            raise ValueError(f"--threshold is {self.threshold}; expected 0 nats or more.")
        wrong = [k for k in self.ks or () if not 1 <= k <= self.samples]
        if wrong or self.ks == ():
            raise ValueError(
                f"--k is {wrong[0] if wrong else 'empty'}; expected 1 to {self.samples}, the "
                "responses per prompt. Raise --samples, or lower k."
            )

    @property
    def k(self) -> tuple[int, ...]:
        wanted = self.ks or tuple(k for k in (1, 4, 8) if k <= self.samples)
        return tuple(sorted(set(wanted)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A checkpoint to evaluate: its files are there and whole."""

    label: str
    layout: Layout
    files: Mapping[str, str]
    """sha256 of weights and configs, those of a local base included."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """Everything that is the same for all checkpoints, and the checkpoints."""

    request: EvaluationRequest
    config: Config
    facts: TrainingFacts
    problems: tuple[Problem, ...]
    reward: Reward
    settings: EvaluationSettings
    """What decides the numbers besides the checkpoint."""
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]

    @property
    def horizon(self) -> int:
        return self.settings["max_new_tokens"]

    @property
    def sampled(self) -> Estimand:
        """The distribution that responses are drawn from."""
        settings = self.settings
        return Estimand(
            temperature=settings["temperature"], top_p=settings["top_p"], horizon=self.horizon
        )

    def key(self, candidate: Candidate) -> str:
        return digest({"settings": self.settings, "files": dict(candidate.files)})

    def problems_for(self, tokenizer: Any) -> list[Problem]:
        """In the tokenizer's chat template, where that was asked for."""
        talk = any("messages" in problem.facts for problem in self.problems)
        if not (self.facts.chat or talk):
            return list(self.problems)
        return _problems(self.config, self.facts, len(self.problems), tokenizer=tokenizer)


def prepared(
    config: Config, checkpoints: Sequence[str | Path], request: EvaluationRequest
) -> Evaluation:
    """Find, read and check all that can be without a model; the first thing wrong is an error."""
    layouts = [_layout(path) for path in _expanded(config, checkpoints)]
    labels = _labels(layouts)
    candidates = [_candidate(config, lay, label) for lay, label in zip(layouts, labels)]
    facts = _agreed(config, layouts, labels)
    _refuse_unread(config, facts["dataset_name"])
    _check_records(config, layouts, facts)
    problems = _problems(config, facts, request.prompts)
    if len(problems) < request.prompts and request.prompts == DEFAULT_PROMPTS and own(facts):
        request = replace(request, prompts=len(problems))  # all that the run has
    if len(problems) < request.prompts:
        raise ValueError(
            f"{facts['dataset_name']} has {len(problems)} different problems; {request.prompts} "
            "were asked for. Lower --prompts, or give a larger dataset (--task, --data)."
        )
    if request.rewards is None and own(facts):
        reward = reward_of(facts, config)
        names = tuple(reward.functions)
        code: dict[str, str | None] = {
            one["name"]: one["sha256"] for one in facts["reward_sources"]
        }
    else:
        names = request.rewards or default_functions(facts["dataset_name"])
        reward = build_reward(names, seconds=config.data.reward_seconds)
        code = {name: _code(name) for name in names}
    sampling = config.sampling
    settings: EvaluationSettings = {
        "schema": SCHEMA,
        "dataset": facts["dataset_name"],
        "split": _split(config, facts),
        "problems": digest([[p.id, p.prompt, p.answer] for p in problems]),
        "prompts": request.prompts,
        "samples": request.samples,
        "seed": config.sampling.seed,
        "chat_template": facts.chat,
        "temperature": facts["temperature"],
        "top_p": facts["top_p"],
        "max_new_tokens": sampling.max_new_tokens or facts["max_completion_length"],
        "stop": list(sampling.stop or facts.values.get("stop") or ()),
        "rewards": code,
        "threshold": request.threshold,
        "dtype": config.checkpoint.dtype,
    }
    if config.checkpoint.sharding != "none":
        # A quantised base is cut unquantised: another model than the whole one.
        settings["sharding"] = config.checkpoint.sharding
    return Evaluation(
        request=request,
        config=config,
        facts=facts,
        problems=tuple(problems),
        reward=reward,
        settings=settings,
        candidates=tuple(candidates),
        notes=_notes(facts, reward, request),
    )


def own(facts: TrainingFacts) -> bool:
    """Whether prompts and reward are those that the run recorded."""
    named = "reward_sources" in facts.values or "reward_absent" in facts.values
    return facts["dataset_name"] == RECORDED and named


def _check_records(config: Config, layouts: Sequence[Layout], facts: TrainingFacts) -> None:
    """Recorded prompts must be there and unchanged; so must each checkpoint's files."""
    if facts["dataset_name"] == RECORDED:
        refuse_unrecorded(facts)
    for layout in layouts:
        record = read_record(layout.folders)
        if record is not None and facts["dataset_name"] == RECORDED:
            record.check_prompts()


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _expanded(config: Config, checkpoints: Sequence[str | Path]) -> list[Path]:
    """A run's folder stands for its checkpoints; nothing named: a few of the embedded run."""
    if not checkpoints:
        configured = config.checkpoint.path or config.checkpoint.adapter
        if configured is not None:
            return [packaged_checkpoint(configured)]
        steps = checkpoints_by_step(embedded_trajectory())
        last = len(steps) - 1
        return [steps[round(i * last / (DEFAULT_COUNT - 1))] for i in range(DEFAULT_COUNT)]
    out: list[Path] = []
    for checkpoint in map(packaged_checkpoint, checkpoints):
        inside = checkpoints_by_step(checkpoint)
        own = any((checkpoint / name).is_file() for name in (ADAPTER_CONFIG, MODEL_CONFIG))
        out += [checkpoint] if own or not inside else inside
    return out


def _layout(path: Path) -> Layout:
    try:
        return find_checkpoint(path)
    except FileNotFoundError as missing:
        if any((path / name).is_file() for name in (ADAPTER_CONFIG, MODEL_CONFIG)):
            raise
        raise FileNotFoundError(
            f"{missing} Or give a folder that holds checkpoint-N, step_N or global_step_N."
        ) from None


def _refuse_unread(config: Config, name: str) -> None:
    """A file or a split that was asked for and would not be looked at."""
    batch = config.data
    path, split = batch.file, batch.evaluation_split or batch.split
    if name.startswith(MADE):
        if path is not None:
            raise ValueError(
                f"--data is {path}, and {name} reads no file: its problems are made here. Leave "
                f"--data out; or, for the questions of a file: --task {path}."
            )
        if split is not None and split not in MADE_SPLITS:
            raise ValueError(
                f"--split is {split!r}; {name} is made here, and its splits are "
                f"{' and '.join(MADE_SPLITS)}. Name one of them, or leave --split out."
            )
    elif name == "jsonl" and split is not None and path is not None and Path(path).is_file():
        raise ValueError(
            f"--split is {split!r}, and {path} is one file, which is read whole. Leave --split "
            f"out, or give a folder with {split}.jsonl."
        )


def _labels(layouts: Sequence[Layout]) -> list[str]:
    """step_N; with as much of the path before it as tells two of them apart."""
    roots = [layout.root for layout in layouts]
    twice = sorted({str(root) for root in roots if roots.count(root) > 1})
    if twice:
        raise ValueError(f"{twice[0]} is named twice; expected every checkpoint once.")
    labels = [layout.name for layout in layouts]
    depth = 1
    while len(set(labels)) < len(labels):
        depth += 1
        labels = ["_".join([*r.parts[-depth:-1], lay.name]) for r, lay in zip(roots, layouts)]
    return labels


def _candidate(config: Config, layout: Layout, label: str) -> Candidate:
    settings = config.checkpoint
    check_safetensors(layout.files)
    recorded, base, record = None, None, read_record(layout.folders)
    if layout.kind == "lora":
        recorded = read_adapter_config(layout).get("base_model_name_or_path")
    own_base = carries_base(layout)
    if not own_base and (layout.kind == "lora" or not (layout.config / MODEL_CONFIG).is_file()):
        base = find_base(
            layout,
            base=settings.base,
            backbone=settings.backbone,
            recorded=recorded,
            local=None if record is None else record.base_folder,
        )
    own, of_base = deciding_files(layout, base)
    hashes = {os.path.relpath(f, layout.root): sha256(f) for f in own if f.is_file()}
    if record is not None and record.path.parent == layout.root:
        record.refuse_changed(hashes)
    if base is not None:
        hashes["base"] = base.location
        if base.folder is not None:
            check_safetensors([file for file in of_base if file.suffix == ".safetensors"])
            hashes["base"] = digest([sha256(file) for file in of_base if file.is_file()])
    return Candidate(label=label, layout=layout, files=hashes)


def _agreed(config: Config, layouts: Sequence[Layout], labels: Sequence[str]) -> TrainingFacts:
    """What is given, read or assumed about task and distribution, the same for all."""
    every = [training_facts(config, *read_facts(lay.folders)[:2]) for lay in layouts]
    chosen = {
        "dataset_path": config.data.file,
        "split": config.data.evaluation_split or config.data.split,
        "max_completion_length": config.sampling.max_new_tokens,
        "stop": config.sampling.stop,
    }
    # The path and split of one dataset are not those of another.
    if config.data.dataset is not None:
        chosen |= {"dataset_path": True, "split": True}
    for name in SHARED:
        values = [facts.values.get(name) for facts in every]
        other = next((i for i, value in enumerate(values) if value != values[0]), None)
        if other is not None and not chosen.get(name):
            raise ValueError(
                f"{labels[0]} was trained with {name} = {values[0]!r}, {labels[other]} with "
                f"{values[other]!r}; expected one for all, since checkpoints are compared. Say "
                f"which: {KEY_OF[name]}."
            )
    return every[0]


def _problems(
    config: Config, facts: TrainingFacts, count: int, *, tokenizer: Any = None
) -> list[Problem]:
    return load_problems(
        facts["dataset_name"],
        path=_path(config, facts),
        split=_split(config, facts),
        count=count,
        seed=config.sampling.seed,
        tokenizer=tokenizer,
        chat=facts.chat and tokenizer is not None,
        conversation=facts.conversation,
    )


def _path(config: Config, facts: TrainingFacts) -> str | None:
    batch = config.data
    own = batch.dataset is None  # a task named here is not read from training's file
    return batch.file or (facts.values.get("dataset_path") if own else None)


def _split(config: Config, facts: TrainingFacts) -> str | None:
    batch = config.data
    own = batch.dataset is None
    named = batch.evaluation_split or batch.split
    return named or (facts.values.get("split") or facts.values.get("E_split") if own else None)


def _code(name: str) -> str | None:
    """The hash of a function of one's own: of the file of its module."""
    module, colon, _ = name.rpartition(":")
    if module.endswith(".py"):
        return sha256(Path(module))
    spec = find_spec(module) if colon else None
    if spec is None or not spec.has_location:
        return None
    return sha256(Path(str(spec.origin)))


def _notes(facts: TrainingFacts, reward: Reward, request: EvaluationRequest) -> tuple[str, ...]:
    names = ("dataset_name", "temperature", "max_completion_length")
    assumed = [f"{name} = {facts.assumed[name]}" for name in names if name in facts.assumed]
    note = f"assumed, since no file says: {', '.join(assumed)}"
    recorded: list[str] = []
    if own(facts) and request.rewards is None:
        recorded.append(
            f"{request.prompts} prompts and the reward ({', '.join(reward.functions)}) are the "
            "run's own; a response passes if every function gives at least 1"
        )
    return (*facts.notes, *([note] if assumed else []), *recorded)
