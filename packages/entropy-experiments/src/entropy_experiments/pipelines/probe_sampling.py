"""A checkpoint opened for probing, and the rollouts drawn from it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from entropy_experiments.attribution.eventual import momentum_of
from entropy_experiments.checkpoints.load import Checkpoint, load_checkpoint
from entropy_experiments.checkpoints.optimizer_state import refuse_zero_lr
from entropy_experiments.checkpoints.recorded_step import MADE_STEP, read_recorded_step
from entropy_experiments.checkpoints.runs import default_checkpoint, packaged_checkpoint
from entropy_experiments.checkpoints.training_record import RECORDED
from entropy_experiments.config import Config
from entropy_experiments.distributed import current
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.models.sharded import ShardedPolicy
from entropy_experiments.pipelines.run_conditions import (
    check_sharded_derivatives,
    check_sharding,
    loaded,
    refuse_sharding,
)
from entropy_experiments.pipelines.training_facts import (
    TrainingFacts,
    refuse_unrecorded,
    reward_of,
    training_facts,
    with_learning_rate,
)
from entropy_experiments.sampling.datasets import LARGEST_COUNT, Problem, load_problems
from entropy_experiments.sampling.dumps.formats import dump_files
from entropy_experiments.sampling.generate import UNITS, SampleGenerator
from entropy_experiments.sampling.rollout_files import (
    RolloutStore,
    load_rollouts,
    load_update_batch,
    save_rollouts,
    save_update_batch,
)
from entropy_experiments.types import OptimizerState, Rollouts, UpdateBatch
from entropy_experiments.types.direction import AdamGroup

PromptIds = tuple[int, ...]


class TooFewPromptsError(ValueError):
    """There are fewer prompts than were asked for."""


class AvoidedPrompts(Protocol):
    """Prompts that must not be drawn; a set of `PromptIds` is one."""

    def __contains__(self, prompt: object, /) -> bool: ...

    def __len__(self) -> int: ...


SAME_RATE = 1e-6
"""Relative difference up to which a recorded learning rate is the checkpoint's: fp32 rounding."""
MIN_RECORDED = 2
"""Prompts below which a recorded run's own are not enough for any spread."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenCheckpoint:
    """A checkpoint, ready to be probed."""

    checkpoint: Checkpoint
    policy: SequenceProcessor | ShardedPolicy
    facts: TrainingFacts
    optimizer: OptimizerState


def open_checkpoint(
    config: Config, checkpoint_path: str | Path | None, *, may_shard: bool = False
) -> OpenCheckpoint:
    """Read the checkpoint that the call or the config names; the embedded default otherwise.

    `may_shard`: what is done with it can be done with a model cut over the ranks.
    """
    settings = config.checkpoint
    load = partial(
        load_checkpoint,
        packaged_checkpoint(
            checkpoint_path or settings.path or settings.adapter or default_checkpoint()
        ),
        base=settings.base,
        backbone=settings.backbone,
        adapter_path=settings.adapter,
        optimizer_path=settings.optimizer,
        dtype=settings.dtype,
    )
    if not may_shard:
        refuse_sharding(config)
    check_sharded_derivatives(config)
    checkpoint, sharded = loaded(config, load)
    assert checkpoint.optimizer is not None  # need_optimizer: its absence is refused
    if settings.optimizer is None and checkpoint.optimizer_count > (checkpoint.step or 0):
        _refuse_later_optimizer(checkpoint)
    own_lr, recorded = config.update.lr, recorded_rate(checkpoint)
    if own_lr is None and recorded == 0:
        raise ValueError(
            f"Training made the step from {checkpoint.path} at learning rate 0, as recorded (the "
            f"first step of a warm-up, for instance); the checkpoint's optimizer holds "
            f"{checkpoint.optimizer.lr:.6g}. Expected a step that moved something: take another "
            "checkpoint, or set update.lr to analyse a hypothetical step."
        )
    lr = own_lr if own_lr is not None else recorded or checkpoint.optimizer.lr
    refuse_zero_lr(lr, checkpoint.path)
    if not isinstance(checkpoint.optimizer.groups[0], AdamGroup):
        raise ValueError(
            f"The optimizer of {checkpoint.path} is SGD; expected Adam or AdamW, whose step the "
            "probe rebuilds. update.sgd.sgd_direction serves an SGD step from Python."
        )
    momentum_of(checkpoint.optimizer)  # groups that differ in b1 are refused before any stage
    facts = training_facts(config, checkpoint.facts, checkpoint.fact_sources)
    if recorded is not None and own_lr is None:
        facts = replace(facts, notes=(*facts.notes, other_rate(recorded, checkpoint.optimizer.lr)))
    checkpointing = config.memory.gradient_checkpointing
    check_sharding(config, top_p=facts["top_p"])
    if sharded is None:
        policy = SequenceProcessor(
            checkpoint.model,
            temperature=facts["temperature"],
            top_p=facts["top_p"],
            checkpointing=checkpointing,
        )
    else:
        policy = ShardedPolicy(
            sharded, temperature=facts["temperature"], checkpointing=checkpointing
        )
    optimizer = with_learning_rate(checkpoint.optimizer, lr)
    return OpenCheckpoint(checkpoint=checkpoint, policy=policy, facts=facts, optimizer=optimizer)


def recorded_rate(checkpoint: Checkpoint) -> float | None:
    """The learning rate at which training made the step from here, where it is recorded and the
    checkpoint holds another one; None: it holds that one, or nothing is recorded."""
    assert checkpoint.optimizer is not None
    if checkpoint.recorded is None:
        return None
    made = read_recorded_step(checkpoint.recorded.parent / MADE_STEP)
    if made is None or not made.lr >= 0 or checkpoint.step not in (None, made.step):
        return None  # a record of another step is refused where its batch is read
    same = math.isclose(made.lr, checkpoint.optimizer.lr, rel_tol=SAME_RATE)
    return None if same else made.lr


def other_rate(recorded: float, stored: float) -> str:
    """The note on it."""
    return (
        f"training made its step at learning rate {recorded:.6g}, as recorded, which is used here; "
        f"the checkpoint's optimizer holds {stored:.6g} (a schedule that moved on after the "
        "checkpoint was saved, for instance)"
    )


def _refuse_later_optimizer(checkpoint: Checkpoint) -> None:
    reason = checkpoint.other_count
    if reason:
        raise ValueError(
            f"{checkpoint.path}: {reason}; if this is the one, set checkpoint.optimizer to it (the "
            "result is then not trusted unless a certificate shows the step that was made)."
        )


def contents(
    config: Config, probed: OpenCheckpoint, more: Iterable[str | Path | None] = ()
) -> dict[str, list[str]]:
    """Hashes of the files beside the checkpoint that decide a batch: part of every key.

    Datasets, saved and recorded batches, reward functions of your own (the file of their module,
    not what it imports), and what else is named in `more`.
    """
    named = [
        config.data.file or probed.facts.values.get("dataset_path"),
        config.sampling.load,
        probed.checkpoint.recorded,
        *more,
    ]
    return named_contents(probed.facts, named)


def named_contents(facts: TrainingFacts, named: Iterable[object]) -> dict[str, list[str]]:
    """Hashes of the files `named`, and of reward functions of your own."""
    sources = facts.values.get("reward_sources") or ()
    own = [name.rpartition(":")[0] for name in facts["reward_functions"] if ":" in name]
    return {
        **{str(path): _hashes(Path(path)) for path in named if isinstance(path, str | Path)},
        **{f"{module}:": _hashes(_source(module)) for module in own},
        **{f"{one['name']}:": [str(one.get("sha256"))] for one in sources},
    }


def _hashes(path: Path | None) -> list[str]:
    """Of a file, or of every file below a folder; nothing there: it is refused later."""
    if path is None:
        return []
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return [
        f"{p.relative_to(path)} {hashlib.sha256(p.read_bytes()).hexdigest()}"
        for p in files
        if p.is_file()
    ]


def _source(module: str) -> Path | None:
    if module.endswith(".py"):
        return Path(module)
    try:
        spec = find_spec(module)
    except Exception:  # a package of the user's may fail in any way; build_reward says which
        return None
    return None if spec is None or not spec.has_location else Path(str(spec.origin))


class Sampler:
    """Draws rollouts of a checkpoint on its task; what is drawn is on disk at once."""

    def __init__(
        self, config: Config, probed: OpenCheckpoint, *, quiet: bool = True, units: int = UNITS
    ) -> None:
        facts = probed.facts
        self.config, self.facts, self.policy = config, facts, probed.policy
        self.horizon = config.sampling.max_new_tokens or facts["max_completion_length"]
        self.generator = SampleGenerator(
            probed.policy,
            probed.checkpoint.tokenizer,
            max_new_tokens=self.horizon,
            stop=config.sampling.stop or facts.values.get("stop") or (),
            batch_size=config.sampling.batch_size,
            master_seed=config.sampling.seed,
            progress=not quiet and current().first,
            units=units,
        )
        self.retries: int | None = None
        self.notes: list[str] = []
        """What is to be said about the prompts."""
        self._record, self._root = probed.checkpoint.record, probed.checkpoint.path
        self._folder = config.rollout_folder
        self._loaded = None if config.sampling.load is None else Path(config.sampling.load)
        if self._loaded is not None:
            _refuse_dump(self._loaded)
        identity = self.generator.identity()
        self.meta = {"dataset": facts["dataset_name"], "identity": identity}
        named = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        self.generator.store = RolloutStore(self._folder / "units" / named)

    @property
    def room(self) -> int:
        """Prompts that an update batch needs of a run that has few: as many as training's had."""
        wanted = self.config.data.update_prompts
        return max(MIN_RECORDED, min(wanted, self.facts.values.get("B_U") or wanted))

    def evaluation(self, avoid: set[PromptIds], *, leave: int = 0) -> Rollouts:
        """Evaluation prompts with one response each, none of them a prompt of `avoid`.

        `leave`: so many prompts of a recorded run are left for the update batch, if it has few.
        """
        if self._loaded is not None:
            folder = self._loaded / "evaluation"
            rollouts, meta = load_rollouts(folder)
            self._refuse_other_policy(meta, folder)
        else:
            data = self.config.data
            split, count = data.evaluation_split, data.evaluation_prompts
            problems = self.problems("evaluation", split, count, avoid, leave=self._shared(leave))
            rollouts = self.generator.generate_evaluation_batch(problems)
            if self.config.sampling.save is not None:
                folder = self._folder / "evaluation"
                current().broadcast_from_zero(
                    lambda: save_rollouts(folder, rollouts, meta=self.meta)
                )
        return replace(rollouts, behaviour_logprob_NS=None)  # of the very policy that is probed

    def _shared(self, leave: int) -> int:
        """`leave`, where both batches are of one recorded set."""
        batch, values = self.config.data, self.facts.values
        either = batch.split or values.get("split")
        sets = (
            batch.evaluation_split or either or values.get("E_split"),
            batch.update_split or either or values.get("U_split"),
        )
        return leave if sets[0] == sets[1] else 0

    def saved_update(self) -> tuple[UpdateBatch, list[str]] | None:
        """The update batch in sampling.load, if there is one."""
        if self._loaded is None or not (self._loaded / "update").is_dir():
            return None
        folder = self._loaded / "update"
        batch, meta = load_update_batch(folder)
        self._refuse_other_policy(meta, folder)
        return _own(batch), [f"update rollouts reused from {folder}"]

    def update(self, avoid: set[PromptIds]) -> tuple[UpdateBatch, list[str]]:
        """Update prompts with their responses, none of `avoid`; and what to note about them."""
        data, facts = self.config.data, self.facts
        most = data.update_prompts * (1 + data.max_resamples)
        pool = self.problems("update", data.update_split, data.update_prompts, avoid, most=most)
        count = min(data.update_prompts, len(pool))
        drawn = self.generator.generate_update_batch(
            pool,
            prompts=count,
            group=data.responses_per_prompt,
            reward=reward_of(facts, self.config).at_checkpoint(self._root),
            scale=facts["advantage"],
            filter_zero_advantage=data.resample_equal_rewards,
            tol=data.zero_advantage_tolerance,
            max_attempts=data.max_resamples,
        )
        self.retries = drawn.retries
        if self.config.sampling.save is not None:
            folder = self._folder / "update"
            current().broadcast_from_zero(
                lambda: save_update_batch(folder, drawn.batch, meta=self.meta)
            )
        used = {
            "B_U": ("data.update_prompts", count),
            "G": ("data.responses_per_prompt", data.responses_per_prompt),
        }
        other = [
            f"training had {key} = {facts.values[name]}; the drawn batch has {value}"
            for name, (key, value) in used.items()
            if facts.values.get(name, value) != value
        ]
        return _own(drawn.batch), [*drawn.notes, *other]

    def problems(
        self,
        role: str,
        split: str | None,
        least: int,
        avoid: AvoidedPrompts,
        *,
        most: int | None = None,
        leave: int = 0,
    ) -> list[Problem]:
        """At least `least` and up to `most` problems whose prompts are none of `avoid`.

        Of a recorded run with too few, what there is without the last `leave`.
        """
        batch, most, facts = self.config.data, most or least, self.facts
        recorded = facts["dataset_name"] == RECORDED
        if least > LARGEST_COUNT:
            raise ValueError(f"data.{role}_prompts is {least}; expected at most {LARGEST_COUNT}.")
        if recorded:
            refuse_unrecorded(facts)
            if self._record is not None:
                self._record.check_prompts()
        own_split = facts.values.get("E_split" if role == "evaluation" else "U_split")
        available = load_problems(
            facts["dataset_name"],
            path=batch.file or facts.values.get("dataset_path"),
            split=split or batch.split or facts.values.get("split") or own_split,
            count=min(most + len(avoid) + (leave if recorded else 0), LARGEST_COUNT),
            seed=self.config.sampling.seed,
            tokenizer=self.generator.tokenizer,
            chat=facts.chat,
            conversation=facts.conversation,
        )
        # As far as needed: tokenizing thousands takes longer than answering a few.
        unlike = (p for p in available if self.generator.prompt_ids(p) not in avoid)
        fresh = list(islice(unlike, most + (leave if recorded else 0)))
        fresh = fresh[: min(most, max(MIN_RECORDED, len(fresh) - leave))] if recorded else fresh
        if recorded and MIN_RECORDED <= len(fresh) < least:
            self.notes.append(
                f"the run has {len(fresh)} prompts for the {role} batch, and all are used "
                f"(data.{role}_prompts is {least}"
                + (f"; {leave} are left for the update batch)" if leave else ")")
            )
            return fresh
        if len(fresh) < least:
            raise TooFewPromptsError(
                f"{self.facts['dataset_name']} has {len(fresh)} problems left for the {role} "
                f"batch; {least} are needed, none of them shared by the two batches. Lower "
                "data.evaluation_prompts or data.update_prompts, or give a larger data.file."
            )
        return fresh

    def all_problems(self) -> list[Problem]:
        """Every prompt that the run recorded, of all its sets; none without a record."""
        if self._record is None or self.facts["dataset_name"] != RECORDED:
            return []
        self._record.check_prompts()
        path = self.facts.values.get("dataset_path")
        return [
            problem
            for name in self._record.sets
            for problem in load_problems(RECORDED, path=path, split=name)
        ]

    def _refuse_other_policy(self, meta: dict[str, Any], folder: Path) -> None:
        if "identity" not in meta:
            raise ValueError(
                f"The rollouts in {folder} do not say what drew them, as imported ones do not; "
                "expected rollouts that this program drew for the checkpoint and settings at hand. "
                "Leave sampling.load out to draw new ones. Imported evaluation rollouts go to "
                "`entropy-probe influence` as kind: from_file, an imported update batch into the "
                "checkpoint's own folder as update_batch."
            )
        ours = {**self.meta["identity"], "dataset": self.meta["dataset"]}
        theirs = {**(meta.get("identity") or {}), "dataset": meta.get("dataset")}
        if theirs != ours:
            keys = sorted(k for k in ours if theirs.get(k) != ours[k])
            raise ValueError(
                f"The rollouts in {folder} were drawn with another {', '.join(keys)}; expected "
                "rollouts of the checkpoint and settings at hand. Leave sampling.load out to draw "
                "new ones."
            )


def _refuse_dump(path: Path) -> None:
    """sampling.load takes rollouts that were drawn here; another framework's belong elsewhere."""
    drawn_here = any((path / name).is_dir() for name in ("evaluation", "update"))
    if not path.exists() or drawn_here:
        return
    try:
        files = dump_files(path)
    except (ValueError, OSError):
        return  # nothing that is known: the error that follows says what was expected
    raise ValueError(
        f"sampling.load: {files[0]} is a dump of another program; expected rollouts that this one "
        "drew. As evaluation rollouts or update batch it goes to `entropy-probe influence` as "
        "kind: from_file. For run and measure, read_dump and save_update_batch put it beside the "
        "checkpoint as update_batch."
    )


def _own(batch: UpdateBatch) -> UpdateBatch:
    """Drawn from the very policy that is probed: no weights are needed."""
    return replace(batch, rollouts=replace(batch.rollouts, behaviour_logprob_NS=None))


def prompts_of(rollouts: Rollouts) -> set[PromptIds]:
    """The prompts' token ids."""
    return set(prompt_ids(rollouts))


def prompt_ids(rollouts: Rollouts) -> list[PromptIds]:
    """Of each rollout, the token ids before its response."""
    prompts = []
    for tokens_S, attention_S, response_S in zip(
        rollouts.tokens_NS, rollouts.attention_NS, rollouts.response_NS, strict=True
    ):
        before = slice(0, int(response_S.nonzero()[0]))
        prompts.append(tuple(tokens_S[before][attention_S[before]].tolist()))
    return prompts


def response_ids(rollouts: Rollouts) -> list[list[int]]:
    """Of each rollout, the token ids of its response."""
    return [
        tokens_S[response_S].tolist()
        for tokens_S, response_S in zip(rollouts.tokens_NS, rollouts.response_NS, strict=True)
    ]
