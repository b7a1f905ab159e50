"""Phase 0: the checkpoint, the training facts, the evaluation rollouts and the update batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from entropy_experiments.checkpoints.layout import UPDATE_BATCH
from entropy_experiments.checkpoints.load import Checkpoint
from entropy_experiments.checkpoints.recorded_step import (
    MADE_STEP,
    RecordedStep,
    read_recorded_step,
)
from entropy_experiments.checkpoints.runs import checkpoints_by_count
from entropy_experiments.config import Config
from entropy_experiments.estimate.modes import Used, used_mode
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.models.sharded import ShardedPolicy
from entropy_experiments.numerics.sketch import distance, sketch
from entropy_experiments.pipelines.probe_sampling import (
    OpenCheckpoint,
    PromptIds,
    Sampler,
    TooFewPromptsError,
    open_checkpoint,
    prompts_of,
    recorded_rate,
)
from entropy_experiments.pipelines.training_facts import TrainingFacts
from entropy_experiments.pipelines.without_effect import (
    FixedBatch,
    evaluation_without_effect,
    update_without_effect,
)
from entropy_experiments.sampling.generate import UNITS
from entropy_experiments.sampling.rollout_files import (
    load_rollouts,
    load_update_batch,
    recorded_meta,
)
from entropy_experiments.types import Direction, OptimizerState, Params, Rollouts, UpdateBatch
from entropy_experiments.update.adamw import (
    UpdateStats,
    compute_update_vector_adamw,
    update_of_gradient,
)
from entropy_experiments.update.gradient import clip_factor, loss_gradient
from entropy_experiments.update.objective import LOSS_SETTINGS

Say = Callable[[str], None]

SAME_WEIGHTS = 4
"""Roundings of the parameters' dtype, by which stored weights may differ from training's."""
WEIGHTS_NOTE = "weights: nothing in the files records their sha256 as training saved them"


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeInputs:
    """All that the mathematics needs, gathered from the model side."""

    config: Config
    checkpoint: Checkpoint
    policy: SequenceProcessor | ShardedPolicy
    facts: TrainingFacts
    optimizer: OptimizerState
    horizon: int
    evaluation: Rollouts
    update: UpdateBatch
    real: bool
    """The update batch was recorded in training."""
    bound: bool
    """The recorded batch names the weights it was drawn from, and they are these."""
    retries: int | None
    """Groups drawn in place of groups with equal rewards; None: the batch was not drawn here."""
    notes: tuple[str, ...]
    timing: dict[str, float]
    made: RecordedStep | None = None
    """What training recorded of the step that it made from here."""

    @property
    def altered(self) -> tuple[str, ...]:
        """Facts of the loss for which the config asks for something else than training had."""
        names = (*LOSS_SETTINGS, "max_grad_norm")
        return tuple(
            f"{name} = {self.facts.values[name]} instead of {self.facts.read[name]}"
            for name in names
            if name in self.facts.read and self.facts.values[name] != self.facts.read[name]
        )

    @property
    def has_gradient(self) -> bool:
        """Whether the step is made of the gradient that training used, not of a rebuilt one."""
        whole = self.config.checkpoint.sharding == "none"
        made = self.made is not None and self.made.has_gradient
        return made and self.real and whole and not self.altered

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why a step rebuilt from the batch may be another than training's."""
        return (
            *(f"not followed here: {option}" for option in self.facts.unfollowed),
            *limits_of(self.checkpoint.model, self.facts, real=self.real),
        )

    @property
    def other_start(self) -> str:
        """Why training's step was not made from the weights of this checkpoint."""
        if not self.real or self.config.checkpoint.sharding != "none":
            return ""
        return other_start(self.made, self.policy.params)

    @property
    def lr(self) -> float:
        return self.optimizer.lr

    @property
    def bends(self) -> bool:
        """Whether a curvature is defined for the way of differentiating and the top_p."""
        return self.mode != "reverse" and self.policy.top_p == 1

    @property
    def mode(self) -> Used:
        """The way of differentiating: the configured one, or what the model turned out to have."""
        return used_mode(self.policy, self.evaluation, self.config.predict.method)

    @property
    def not_verifiable(self) -> tuple[str, ...]:
        unbound = "update_batch: nothing records the weights it was drawn from"
        return (
            *self.checkpoint.not_verifiable,
            *([unbound] if self.real and not self.bound else []),
            *([] if self.weights_recorded else [WEIGHTS_NOTE]),
        )

    @property
    def weights_recorded(self) -> bool:
        """Whether something recorded the sha256 of the weights: they are what training saved."""
        checkpoint, record = self.checkpoint, self.checkpoint.record
        beside = record is not None and record.path.parent == checkpoint.path
        if beside and record is not None and record.holds(checkpoint.weights):
            return True
        return self.bound and len(checkpoint.weights) == 1

    @property
    def lr_stored(self) -> float:
        """The rate of training's step, whatever the config says: recorded, or the checkpoint's."""
        if self.made is not None and self.made.lr > 0:
            return self.made.lr
        assert self.checkpoint.optimizer is not None  # need_optimizer: its absence is refused
        recorded = recorded_rate(self.checkpoint)  # a batch that was drawn or imported has no step
        if recorded is not None:
            return recorded
        return self.checkpoint.optimizer.lr

    @property
    def estimator(self) -> EstimatorOptions:
        """Options of every estimate of the run."""
        return estimator_options(self.config, self.horizon)

    @property
    def trained(self) -> SequenceProcessor | ShardedPolicy:
        """The policy as the loss sees it."""
        return as_the_loss_sees(self.config, self.policy, self.facts, real=self.real)

    def step(self) -> tuple[Direction, UpdateStats]:
        """The update: of the gradient that training recorded, or rebuilt from the batch."""
        policy, objective = self.trained.as_trained(), self.facts.objective
        microbatch = self.config.memory.microbatch_size
        if not self.has_gradient:
            direction, _, stats = compute_update_vector_adamw(
                policy,
                self.update,
                objective,
                self.optimizer,
                max_grad_norm=self.facts["max_grad_norm"] or None,
                microbatch=microbatch,
            )
            return direction, stats
        assert self.made is not None  # has_gradient
        gradient = self.made.load_gradient(policy.params)
        rebuilt = loss_gradient(policy, self.update, objective, microbatch=microbatch)
        direction, _, stats = update_of_gradient(policy, gradient, rebuilt, self.optimizer)
        return direction, stats

    def gradient_distance(self, gradient: Params) -> float | None:
        """How far this gradient, rebuilt from the batch, is from the one that training used."""
        if self.made is None or self.altered or not self.real:
            return None
        if self.config.checkpoint.sharding != "none":
            return None
        factor, _ = clip_factor(gradient, self.facts["max_grad_norm"] or None)
        present = {
            name: factor * g
            for name, g in gradient.items()
            if name not in self.made.without_gradient
        }
        return distance(sketch(present), self.made.gradient.sketch)


def other_start(step: RecordedStep | None, params: Params) -> str:
    """Why this step was not made from these weights; empty: it was, or nothing tells."""
    if step is None or step.before is None:
        return ""
    apart = distance(sketch(params), step.before)
    coarsest = max(torch.finfo(theta.dtype).eps for theta in params.values())
    if apart <= SAME_WEIGHTS * coarsest:
        return ""
    return (
        f"the weights from which training made its step are {apart:.1g} of their size away from "
        "the checkpoint's: something changed them after it was saved, such as another callback. "
        "Save the checkpoint after that change"
    )


def as_the_loss_sees(
    config: Config, policy: SequenceProcessor | ShardedPolicy, facts: TrainingFacts, *, real: bool
) -> SequenceProcessor | ShardedPolicy:
    """Training's temperature for a batch recorded in training, and always the full softmax."""
    temperature = facts.of_training("temperature") if real else policy.temperature
    if temperature == policy.temperature and policy.top_p == 1:
        return policy
    if isinstance(policy, ShardedPolicy):
        return policy.at(temperature)
    return SequenceProcessor(
        policy.model,
        temperature=temperature,
        checkpointing=config.memory.gradient_checkpointing,
    )


def estimator_options(config: Config, horizon: int | None) -> EstimatorOptions:
    """What the numbers of a run estimate, and how they are computed."""
    simple, per_token = config.entropy.surprisal, config.entropy.unit
    return EstimatorOptions(
        form=config.measure.weighting,
        unit="token" if per_token == "per_token" else "sequence",
        entropy="simple" if simple else "rao_blackwell",
        horizon=horizon,
        mode=config.predict.method,
        microbatch=config.memory.microbatch_size,
        forward_microbatch=config.forward_batch_size,
    )


def gather(
    config: Config,
    checkpoint_path: str | Path | None,
    *,
    say: Say | None = None,
    avoid: Iterable[PromptIds] = (),
    units: int = UNITS,
    may_shard: bool = False,
) -> ProbeInputs:
    """Load, then draw what is not there yet; silent unless told how to `say`.

    No evaluation prompt is a prompt of the update batch, or one of `avoid`. `units`: into how many
    parts a large draw is cut, each kept as soon as it is finished.
    """
    tell, timing = say or (lambda line: None), dict[str, float]()
    with timed(timing, "load"):
        probed = open_checkpoint(config, checkpoint_path, may_shard=may_shard)
    checkpoint, facts = probed.checkpoint, probed.facts
    trainable = sum(theta.numel() for theta in probed.policy.params.values())
    tell(
        f"{checkpoint.name}: {checkpoint.kind}, {trainable:,} trainable parameters, base "
        f"{checkpoint.base} ({timing['load']:.1f} s)"
    )
    sampler = Sampler(config, probed, quiet=say is None, units=units)
    with timed(timing, "sampling"):
        made = made_already(config, probed, sampler)
        taken = set() if made is None else prompts_of(made[0].rollouts)
        again = recorded_evaluation(config, checkpoint)
        # E before U: prompts that U tries and drops for equal rewards must not fill E.
        with drawn_for_want_of_a_record(config, checkpoint) if made is None else nullcontext():
            if again is None:
                leave = sampler.room if made is None else 0
                evaluation = sampler.evaluation(taken.union(avoid), leave=leave)
            else:
                evaluation = again
            prompts = prompts_of(evaluation)
            if made is None:
                drawn, said = sampler.update(prompts)
                made = (drawn, False, said)
        update, real, notes = made
        notes = [*notes, *evaluation_notes(config, evaluation), *sampler.notes]
        shared = prompts & prompts_of(update.rollouts)
        if again is None:
            refuse_shared(shared)
        elif shared:
            notes.append(
                f"{len(shared)} of {len(prompts)} evaluation prompts, as recorded, are prompts of "
                "the update batch, which the update moves most"
            )
        if real:
            facts = with_divisor(facts.of_rewarded_batch(), checkpoint)
        update = with_reference(config, probed, update, real=real)
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
        bound=real and weights_of_batch(checkpoint) is not None,
        retries=sampler.retries,
        notes=(*config.notes, *facts.notes, *notes, *limits_of(checkpoint.model, facts, real=real)),
        timing=timing,
        made=made_step(checkpoint) if real else None,
    )


def made_step(checkpoint: Checkpoint) -> RecordedStep | None:
    """What is recorded of the step that was made from this checkpoint."""
    if checkpoint.recorded is None:
        return None
    step = read_recorded_step(checkpoint.recorded.parent / MADE_STEP)
    if step is not None:
        _refuse_other_step(f"The recorded step in {step.folder}", step.step, checkpoint)
    return step


def with_divisor(facts: TrainingFacts, checkpoint: Checkpoint) -> TrainingFacts:
    """The tokens that training divided this very batch's loss by, where they are not its own."""
    if checkpoint.recorded is None:
        return facts
    divisor = recorded_meta(checkpoint.recorded).get("divisor")
    return facts if divisor is None else replace(facts, values={**facts.values, "divisor": divisor})


def recorded_evaluation(config: Config, checkpoint: Checkpoint) -> Rollouts | None:
    """The rollouts that the step was probed with in training, if the config asks for them."""
    if config.data.evaluation_rollouts != "recorded":
        return None
    folder = None
    if checkpoint.recorded is not None:
        folder = checkpoint.recorded.parent / "evaluation"
    if folder is None or not folder.is_dir():
        raise FileNotFoundError(
            f"data.evaluation_rollouts is recorded, and there are no rollouts in {folder} (only "
            "steps that were probed have them). Leave it out, so that new ones are drawn."
        )
    rollouts, meta = load_rollouts(folder)
    at = meta.get("weights")
    if at is not None and at not in checkpoint.hashes.values():
        raise ValueError(
            f"The evaluation rollouts in {folder} were recorded at weights {at[:12]}..., and "
            f"{checkpoint.path} has others. Leave data.evaluation_rollouts out."
        )
    return rollouts


def refuse_shared(prompts: set[PromptIds]) -> None:
    if prompts:
        raise ValueError(
            f"{len(prompts)} prompts are in both batches; expected disjoint ones: an update moves "
            "its own prompts most. Leave sampling.load out, so that new evaluation rollouts are "
            "drawn."
        )


def with_reference(
    config: Config,
    probed: OpenCheckpoint,
    batch: UpdateBatch,
    *,
    real: bool,
    what_if: str | None = None,
) -> UpdateBatch:
    """A KL term needs the reference policy's log-probs; an adapter's is the base without it.

    `what_if`: a counterfactual that has a KL term, whether or not training had one.
    """
    beta = probed.facts["beta"]
    if not (beta or what_if) or batch.ref_logprob_NS is not None:
        return batch
    if probed.checkpoint.kind != "lora":
        reason, away = f"beta is {beta}", "set update.beta: 0 to leave the KL term out"
        if not beta:
            reason, away = f"influence.what_if has {what_if!r}", "leave that what-if out"
        raise ValueError(
            f"{reason} and the update batch has no reference log-probs; the reference of a full "
            f"fine-tune is not in its checkpoint. Record the batch, or {away}."
        )
    policy = as_the_loss_sees(config, probed.policy, probed.facts, real=real)
    with probed.checkpoint.model.disable_adapter():
        scores = score_all(
            policy, policy.params, batch.rollouts, microbatch=config.forward_batch_size
        )
    return replace(batch, ref_logprob_NS=scores.logprob_NS)


def limits_of(model: Any, facts: TrainingFacts, *, real: bool) -> list[str]:
    """Facts of training that a step rebuilt from its batch does not follow."""
    notes: list[str] = []
    dropout = _dropout(model)
    if dropout:
        notes.append(
            f"training may have had dropout ({dropout}); a step rebuilt from its batch has none, "
            "and differs from training's by that noise"
        )
    if facts["num_iterations"] > 1 and not real:
        notes.append(
            f"training makes {facts['num_iterations']} steps of every batch; this is the first of "
            "them"
        )
    if facts["amp_dtype"] not in ("float32", "none"):
        notes.append(
            f"training computed in {facts['amp_dtype']}; a step rebuilt from its batch is in the "
            "parameters' precision, and differs from training's by that rounding"
        )
    return notes


def _dropout(model: Any) -> str:
    """Every dropout rate above 0 that the model's configuration names."""
    rates = {name: value for name, value in vars(model.config).items() if "dropout" in name}
    for adapter in getattr(model, "peft_config", {}).values():
        rates["lora_dropout"] = adapter.lora_dropout
    on = {name: rate for name, rate in rates.items() if isinstance(rate, float) and rate > 0}
    return ", ".join(f"{name} {rate:g}" for name, rate in sorted(on.items()))


@contextmanager
def timed(timing: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    timing[name] = timing.get(name, 0.0) + time.perf_counter() - started


def made_already(
    config: Config, probed: OpenCheckpoint, sampler: Sampler, used: Collection[str] = ()
) -> tuple[UpdateBatch, bool, list[str]] | None:
    """(batch, whether training made it, notes); None when one has to be drawn.

    `used`: keys that score a drawn batch, and that the command needs for something else.
    """
    checkpoint = probed.checkpoint
    if config.data.update_rollouts != "drawn" and checkpoint.recorded is not None:
        batch, meta = load_update_batch(checkpoint.recorded)
        where = f"The update batch in {checkpoint.recorded}"
        refuse_foreign(batch, meta, checkpoint, checkpoint.recorded)
        _refuse_other_step(where, meta.get("step"), checkpoint)
        fixed = FixedBatch(
            what=f"the update batch is the one that training recorded in {checkpoint.recorded}",
            instead="draw a batch, for a hypothetical step: data.update_rollouts: drawn",
            rollouts=batch.rollouts,
        )
        return batch, True, update_without_effect(config, fixed, probed.facts.read, used)
    if config.data.update_rollouts == "recorded":
        raise FileNotFoundError(
            f"No recorded update batch beside {checkpoint.path}; expected a folder update_batch/. "
            "Record training, or let the probe draw one: data.update_rollouts: drawn."
        )
    saved = sampler.saved_update()
    if saved is None:
        return None
    batch, notes = saved
    fixed = FixedBatch(
        what=f"the update batch is the one in {config.sampling.load} (sampling.load)",
        instead="leave sampling.load out",
        rollouts=batch.rollouts,
    )
    # How rewards were scaled is not in the files of a drawn batch.
    return batch, False, notes + update_without_effect(config, fixed, {}, used)


@contextmanager
def drawn_for_want_of_a_record(config: Config, checkpoint: Checkpoint) -> Iterator[None]:
    """Where prompts run out for a batch that is drawn only since no step was recorded: says so.

    Raises:
        ValueError: In place of the one about prompts.
    """
    try:
        yield
    except TooFewPromptsError as error:
        sibling = _recorded_sibling(checkpoint.path)
        drawn = checkpoint.recorded is not None or config.data.update_rollouts == "drawn"
        if drawn or not sibling:  # nothing is missing beside it: prompts are what is wrong
            raise
        raise ValueError(
            f"No step is recorded after {checkpoint.path}: there is no update_batch/ beside it, as "
            "beside the newest checkpoint of a run. To draw a batch in place of it prompts are too "
            f"few ({error}) To analyse a step that training made, give a checkpoint with a record"
            f", such as {sibling}."
        ) from error


def _recorded_sibling(path: Path) -> str:
    """The last checkpoint beside this one whose step is recorded; empty: there is none."""
    try:
        others = checkpoints_by_count(path.parent)
    except (OSError, ValueError):
        return ""
    found = [place for _, place in sorted(others.items()) if (place / UPDATE_BATCH).is_dir()]
    return str(found[-1]) if found else ""


def evaluation_notes(config: Config, evaluation: Rollouts) -> list[str]:
    """On keys that would draw evaluation rollouts, where these were recorded or saved."""
    if config.data.evaluation_rollouts == "recorded":
        what, instead = "recorded in training", "draw some: data.evaluation_rollouts: drawn"
    elif config.sampling.load is not None:
        what, instead = f"in {config.sampling.load} (sampling.load)", "leave sampling.load out"
    else:
        return []
    what = f"the evaluation rollouts are those {what}"
    return evaluation_without_effect(
        config, FixedBatch(what=what, instead=instead, rollouts=evaluation)
    )


def weights_of_batch(checkpoint: Checkpoint) -> str | None:
    """The weights that the recorded batch says it belongs to."""
    assert checkpoint.recorded is not None
    return recorded_meta(checkpoint.recorded).get("weights")


def _refuse_other_step(what: str, step: Any, checkpoint: Checkpoint) -> None:
    """Step N, counted from 0, is made from checkpoint N."""
    if isinstance(step, int) and checkpoint.step is not None and step != checkpoint.step:
        raise ValueError(
            f"{what} is of step {step}; expected that of step {checkpoint.step}, which was made "
            f"from {checkpoint.path}. Put each batch beside the checkpoint it was drawn from, or "
            "set data.update_rollouts: drawn."
        )


def refuse_foreign(
    batch: UpdateBatch, meta: dict[str, Any], checkpoint: Checkpoint, where: str | Path
) -> None:
    """A batch that was recorded at other weights, or with another tokenizer."""
    at = meta.get("weights")
    if at is not None and not isinstance(at, str):
        raise ValueError(
            f"The update batch in {where} names weights {at!r}; expected their sha256 as text. "
            "Restore its manifest, or set data.update_rollouts: drawn."
        )
    if at is not None and at not in checkpoint.hashes.values():
        raise ValueError(
            f"The update batch in {where} was recorded at weights {at[:12]}... (step "
            f"{meta.get('step')}); {checkpoint.path} has others. Put each batch beside the "
            "checkpoint it was drawn from, or set data.update_rollouts: drawn."
        )
    rows = checkpoint.model.get_input_embeddings().weight.shape[0]
    highest = int(batch.rollouts.tokens_NS.max())
    if highest >= rows:
        raise ValueError(
            f"The update batch in {where} has token id {highest}; the model has {rows} tokens. It "
            "was recorded with another model."
        )
