"""Phase 0: the checkpoint, the training facts, the evaluation rollouts and the update batch."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from entropy_experiments.config import Config
from entropy_experiments.estimate.first_order import PAIRED_WITH
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.policy.load import Checkpoint, load_checkpoint
from entropy_experiments.policy.optimizer_state import refuse_zero_lr
from entropy_experiments.policy.scoring import SequenceProcessor
from entropy_experiments.rollouts.sample import SampleGenerator
from entropy_experiments.rollouts.store import (
    RolloutStore,
    load_rollouts,
    load_update_batch,
    save_rollouts,
    save_update_batch,
)
from entropy_experiments.tasks.datasets import Problem, load_problems
from entropy_experiments.tasks.rewards import build_reward
from entropy_experiments.training_facts import TrainingFacts, training_facts, with_learning_rate
from entropy_experiments.trajectory import default_checkpoint
from entropy_experiments.types import Direction, OptimizerState, Rollouts, UpdateBatch
from entropy_experiments.update.adamw import UpdateStats, compute_update_vector_adamw

Say = Callable[[str], None]
PromptIds = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeInputs:
    """All that the mathematics needs, gathered from the model side."""

    config: Config
    checkpoint: Checkpoint
    policy: SequenceProcessor
    facts: TrainingFacts
    optimizer: OptimizerState
    horizon: int
    evaluation: Rollouts
    update: UpdateBatch
    real: bool
    """The update batch was recorded in training."""
    retries: int | None
    """Groups drawn in place of groups with equal rewards; None: the batch was not drawn here."""
    notes: tuple[str, ...]
    timing: dict[str, float]

    @property
    def lr(self) -> float:
        return self.optimizer.lr

    @property
    def lr_stored(self) -> float:
        """The rate in the checkpoint, whatever the config says."""
        assert self.checkpoint.optimizer is not None  # need_optimizer: its absence is refused
        return self.checkpoint.optimizer.lr

    @property
    def measuring(self) -> dict[str, Any]:
        return measuring(self.config, self.horizon)

    @property
    def predicting(self) -> dict[str, Any]:
        """The same for slopes, in the form that is the measurement's derivative."""
        paired = {form: slope for slope, form in PAIRED_WITH.items()}
        return {
            **self.measuring,
            "form": paired[self.config.importance.is_mode],
            "microbatch": self.config.memory_config.microbatch_size,
            "mode": self.config.approx_delta_h.method,
        }

    def step(self) -> tuple[Direction, UpdateStats]:
        """The update, rebuilt from the optimizer's state and the batch."""
        direction, _, stats = compute_update_vector_adamw(
            self.policy.as_trained(),
            self.update,
            self.facts.objective,
            self.optimizer,
            max_grad_norm=self.facts["max_grad_norm"] or None,
            microbatch=self.config.memory_config.microbatch_size,
        )
        return direction, stats


def measuring(config: Config, horizon: int) -> dict[str, Any]:
    """Options of every measurement of a run: what its numbers speak of."""
    simple, per_token = config.estimator.use_simple_entropy_for_x, config.approx_delta_h.normalize
    return {
        "form": config.importance.is_mode,
        "unit": "token" if per_token == "per_token" else "sequence",
        "entropy": "simple" if simple else "rao_blackwell",
        "horizon": horizon,
        "microbatch": config.forward_batch_size,
    }


def gather(
    config: Config,
    checkpoint_path: str | Path | None,
    *,
    say: Say | None = None,
    avoid: Iterable[PromptIds] = (),
) -> ProbeInputs:
    """Load, then draw what is not there yet; silent unless told how to `say`.

    No evaluation prompt is a prompt of the update batch, or one of `avoid`.
    """
    tell, timing = say or (lambda line: None), dict[str, float]()
    with timed(timing, "load"):
        probed = opened(config, checkpoint_path)
    checkpoint, facts = probed.checkpoint, probed.facts
    trainable = sum(theta.numel() for theta in probed.policy.params.values())
    tell(
        f"{checkpoint.name}: {checkpoint.kind}, {trainable:,} trainable parameters, base "
        f"{checkpoint.base} ({timing['load']:.1f} s)"
    )
    sampler = Sampler(config, probed, quiet=say is None)
    with timed(timing, "sampling"):
        update, real, notes = _update_batch(config, checkpoint, sampler)
        evaluation = sampler.evaluation(prompts_of(update.rollouts).union(avoid))
        update = _with_reference(config, probed, update)
    tell(
        f"phase 0: {len(evaluation)} evaluation rollouts, {len(update.rollouts)} update rollouts "
        f"{'recorded' if real else 'drawn'} ({timing['sampling']:.1f} s)"
    )
    return ProbeInputs(
        config=config,
        checkpoint=checkpoint,
        policy=probed.policy,
        facts=facts,
        optimizer=probed.optimizer,
        horizon=sampler.horizon,
        evaluation=evaluation,
        update=update,
        real=real,
        retries=sampler.retries,
        notes=(*config.notes, *facts.notes, *notes, *_limits(facts, real)),
        timing=timing,
    )


def _with_reference(config: Config, probed: Opened, batch: UpdateBatch) -> UpdateBatch:
    """A KL term needs the reference policy's log-probs; an adapter's is the base without it."""
    if not probed.facts["beta"] or batch.ref_logprob_NS is not None:
        return batch
    if probed.checkpoint.kind != "lora":
        raise ValueError(
            f"beta is {probed.facts['beta']} and the update batch has no reference log-probs; the "
            "reference of a full fine-tune is not in its checkpoint. Record the batch, or set "
            "update.beta: 0 to leave the KL term out."
        )
    policy = probed.policy
    with probed.checkpoint.model.disable_adapter():
        found = score_all(
            policy, policy.params, batch.rollouts, microbatch=config.forward_batch_size
        )
    return replace(batch, ref_logprob_NS=found.logprob_NS)


def _limits(facts: TrainingFacts, real: bool) -> list[str]:
    """Facts of training that the rebuilt step does not follow."""
    notes = []
    if facts["num_iterations"] > 1 and not real:
        notes.append(
            f"training makes {facts['num_iterations']} steps of every batch; this is the first of "
            "them"
        )
    if facts["amp_dtype"] not in ("float32", "none"):
        notes.append(
            f"training computed in {facts['amp_dtype']}; the step is rebuilt in the precision of "
            "the parameters here, and differs from the real one by that rounding"
        )
    return notes


@contextmanager
def timed(timing: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    timing[name] = timing.get(name, 0.0) + time.perf_counter() - started


@dataclass(frozen=True, kw_only=True, eq=False)
class Opened:
    """A checkpoint, ready to be probed."""

    checkpoint: Checkpoint
    policy: SequenceProcessor
    facts: TrainingFacts
    optimizer: OptimizerState


def opened(config: Config, checkpoint_path: str | Path | None) -> Opened:
    """Read the checkpoint that the call or the config names; the embedded default otherwise."""
    asked = config.checkpoint
    checkpoint = load_checkpoint(
        checkpoint_path or asked.checkpoint_path or asked.adapter_path or default_checkpoint(),
        base=asked.base,
        backbone=asked.backbone,
        adapter_path=asked.adapter_path,
        optimizer_path=asked.optimizer_path,
        dtype=asked.dtype,
        device_map=asked.device_map,
    )
    assert checkpoint.optimizer is not None  # need_optimizer: its absence is refused
    given = config.update.lr
    lr = checkpoint.optimizer.lr if given is None else given
    refuse_zero_lr(lr, checkpoint.path)
    facts = training_facts(config, checkpoint.facts, checkpoint.fact_sources)
    policy = SequenceProcessor(
        checkpoint.model,
        temperature=facts["temperature"],
        top_p=config.generation.top_p,
        checkpointing=config.memory_config.gradient_checkpointing,
    )
    optimizer = with_learning_rate(checkpoint.optimizer, lr)
    return Opened(checkpoint=checkpoint, policy=policy, facts=facts, optimizer=optimizer)


class Sampler:
    """Draws rollouts of a checkpoint on its task; what is drawn is on disk at once."""

    def __init__(self, config: Config, probed: Opened, *, quiet: bool = True) -> None:
        facts = probed.facts
        self.config, self.facts, self.policy = config, facts, probed.policy
        self.horizon = config.generation.max_new_tokens or facts["max_completion_length"]
        self.generator = SampleGenerator(
            probed.policy,
            probed.checkpoint.tokenizer,
            max_new_tokens=self.horizon,
            stop=config.generation.stop or facts.values.get("stop") or (),
            batch_size=config.generation.gen_batch_size,
            master_seed=config.probe_rework.master_seed,
            progress=not quiet,
        )
        self.retries: int | None = None
        self._folder = config.rollout_folder
        self._loaded = None if config.rollouts.load is None else Path(config.rollouts.load)
        identity = self.generator.identity()
        self._meta = {"dataset": facts["dataset_name"], "identity": identity}
        named = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        self.generator.store = RolloutStore(self._folder / "units" / named)

    def evaluation(self, avoid: set[PromptIds]) -> Rollouts:
        """B_E prompts with one response each, none of them a prompt of `avoid`."""
        if self._loaded is not None:
            folder = self._loaded / "evaluation"
            rollouts, meta = load_rollouts(folder)
            self._refuse_other_policy(meta, folder)
        else:
            asked = self.config.batch_config
            problems = self._problems("evaluation", asked.E_split, asked.B_E, avoid)
            rollouts = self.generator.generate_evaluation_batch(problems)
            if self.config.rollouts.save is not None:
                save_rollouts(self._folder / "evaluation", rollouts, meta=self._meta)
        return replace(rollouts, behaviour_logprob_NS=None)  # of the very policy that is probed

    def update(self) -> tuple[UpdateBatch, list[str]]:
        """B_U prompts with G responses each, and what is to be said about them."""
        if self._loaded is not None and (self._loaded / "update").is_dir():
            folder = self._loaded / "update"
            batch, meta = load_update_batch(folder)
            self._refuse_other_policy(meta, folder)
            notes = [f"update rollouts reused from {folder}"]
        else:
            batch, notes = self._drawn_update()
            if self.config.rollouts.save is not None:
                save_update_batch(self._folder / "update", batch, meta=self._meta)
        rollouts = replace(batch.rollouts, behaviour_logprob_NS=None)
        return replace(batch, rollouts=rollouts), notes

    def _drawn_update(self) -> tuple[UpdateBatch, list[str]]:
        asked, facts = self.config.batch_config, self.facts
        most = asked.B_U * (1 + asked.max_resample_attempts)
        drawn = self.generator.generate_update_batch(
            self._problems("update", asked.U_split, asked.B_U, set(), most=most),
            prompts=asked.B_U,
            group=asked.G,
            reward=build_reward(facts["reward_functions"], facts.values.get("reward_weights")),
            scale=facts["advantage"],
            filter_zero_advantage=asked.filter_zero_advantage_prompts,
            tol=asked.advantage_filter_tol,
            max_attempts=asked.max_resample_attempts,
        )
        self.retries = drawn.retries
        return drawn.batch, list(drawn.notes)

    def _problems(
        self,
        role: str,
        split: str | None,
        least: int,
        avoid: set[PromptIds],
        *,
        most: int | None = None,
    ) -> list[Problem]:
        """At least `least` and up to `most` problems whose prompts are none of `avoid`."""
        batch, most = self.config.batch_config, most or least
        found = load_problems(
            self.facts["dataset_name"],
            path=batch.dataset_path or self.facts.values.get("dataset_path"),
            split=split or batch.split or self.facts.values.get("split"),
            count=most + len(avoid),
            seed=self.config.probe_rework.master_seed,
        )
        fresh = [p for p in found if self.generator.prompt_ids(p) not in avoid][:most]
        if len(fresh) < least:
            raise ValueError(
                f"{self.facts['dataset_name']} has {len(fresh)} problems left for the {role} "
                f"batch; {least} are needed, none of them shared by the two batches. Lower "
                "batch_config.B_E or batch_config.B_U, or give a larger batch_config.dataset_path."
            )
        return fresh

    def _refuse_other_policy(self, meta: dict[str, Any], folder: Path) -> None:
        theirs, ours = meta.get("identity"), self._meta["identity"]
        if theirs != ours:
            keys = sorted(k for k in ours if not theirs or theirs.get(k) != ours[k])
            raise ValueError(
                f"The rollouts in {folder} were drawn with another {', '.join(keys)}; expected "
                "rollouts of the checkpoint and settings at hand. Leave rollouts.load out to draw "
                "new ones."
            )


def _update_batch(
    config: Config, checkpoint: Checkpoint, sampler: Sampler
) -> tuple[UpdateBatch, bool, list[str]]:
    """(batch, whether training made it, notes)."""
    if config.update.batch != "drawn" and checkpoint.recorded is not None:
        batch, _ = load_update_batch(checkpoint.recorded)
        return batch, True, []
    if config.update.batch == "recorded":
        raise FileNotFoundError(
            f"No recorded update batch beside {checkpoint.path}; expected a folder update_batch/. "
            "Record training, or let the probe draw one: update.batch: drawn."
        )
    batch, notes = sampler.update()
    return batch, False, notes


def prompts_of(rollouts: Rollouts) -> set[PromptIds]:
    """The prompts' token ids."""
    found = set()
    for tokens_S, attention_S, response_S in zip(
        rollouts.tokens_NS, rollouts.attention_NS, rollouts.response_NS
    ):
        before = slice(0, int(response_S.nonzero()[0]))
        found.add(tuple(tokens_S[before][attention_S[before]].tolist()))
    return found
