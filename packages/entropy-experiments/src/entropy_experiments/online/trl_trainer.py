"""What TRL hands over: prompts, batch, optimizer and settings of a GRPOTrainer or RLOOTrainer.

What the trainer computes on the way to a step and does not keep, `Captures` keeps. These
methods of its are wrapped on the instance for the time of the training:

    _calculate_rewards                          rewards of every function, of all ranks
    _generate_and_score_completions             they join the batch, and are shuffled with it
    get_high_entropy_mask, get_off_policy_mask  factors of each token's policy loss

Arguments and results pass through untouched, so training is the same bit for bit. What cannot be
kept of them is logged once, and training goes on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from entropy_experiments.checkpoints.training_facts import FactsFile
from entropy_experiments.distributed import Ranks
from entropy_experiments.estimate.own_batch import OwnBatch
from entropy_experiments.online.evaluation_rollouts import chosen_rows
from entropy_experiments.online.trl_options import entropy_coef, is_rloo
from entropy_experiments.online.trl_versions import (
    BOTH,
    GENERATE_METHOD,
    OLDEST,
    REWARD_METHOD,
    eos_of,
    installed_trl,
    is_kind,
    missing_names,
    names_of,
    prompt_ids,
    tokenizer_of,
)
from entropy_experiments.results import JSONObject
from entropy_experiments.sampling.advantages import weighted_rewards
from entropy_experiments.sampling.importers import (
    BY_FUNCTION,
    POLICY_FACTOR,
    REWARD,
    from_trl_inputs,
)
from entropy_experiments.types import Rollouts, UpdateBatch
from entropy_experiments.types.estimate import MIN_PROMPTS
from entropy_experiments.update.objective import objective_from
from entropy_experiments.update.optimizer import TORCH_OPTIMIZERS

LOG = logging.getLogger("entropy_experiments.online")
T = TypeVar("T")


def refuse_unsupported(trainer: Any) -> None:
    """Trainers whose parameters or gradients are not where they seem to be."""
    kind = str(getattr(trainer.accelerator, "distributed_type", "")).rpartition(".")[2]
    if kind == "DEEPSPEED":
        raise ValueError(
            "EntropyProbeCallback under DeepSpeed: its engine keeps gradients and optimizer state "
            "to itself, so no step can be predicted. Expected plain, DDP or single-device "
            "training. Leave the callback out, or probe saved checkpoints offline."
        )
    if kind in ("FSDP", "MEGATRON_LM"):
        raise ValueError(
            f"EntropyProbeCallback under {kind}: parameters are sharded, and forward-mode "
            "differentiation does not pass through shards. Expected plain, DDP or single-device "
            "training. Probe saved checkpoints offline: entropy-probe run."
        )
    if not is_kind(trainer, BOTH):
        raise ValueError(
            f"EntropyProbeCallback in a {type(trainer).__name__}: expected TRL's GRPOTrainer or "
            f"RLOOTrainer (trl {OLDEST} or newer), or a subclass of one. For another trainer use "
            "entropy_experiments.online.loop, or record its steps: "
            "entropy_experiments.online.step_recorder."
        )


def refuse_own_batches(trainer: Any) -> None:
    """Subclasses of TRL's trainers that keep batches of another form than TRL's."""
    if any(base.__module__.partition(".")[0] == "swift" for base in type(trainer).__mro__):
        raise ValueError(
            f"EntropyProbeCallback in ms-swift's {type(trainer).__name__}: it keeps batches of its "
            "own form, which this program does not read. Expected TRL's GRPOTrainer or "
            "RLOOTrainer. Record its steps with entropy_experiments.StepRecorder, or probe saved "
            "checkpoints offline: entropy-probe run."
        )


def refuse_other_optimizers(trainer: Any) -> None:
    """When training begins, not at its first step."""
    optimizer = unwrapped_optimizer(trainer.optimizer)
    if optimizer is not None and not isinstance(optimizer, TORCH_OPTIMIZERS):
        raise ValueError(
            f"EntropyProbeCallback with the optimizer {type(optimizer).__name__}: expected torch's "
            "Adam, AdamW or SGD, whose next step can be predicted. Set optim='adamw_torch' in the "
            "trainer's config, or leave the callback out."
        )


def refuse_other_trl(trainer: Any) -> None:
    """A trainer without the names that the probe reads, which its TRL version should have."""
    if missing := missing_names(trainer):
        raise ValueError(
            f"{type(trainer).__name__} of trl {installed_trl()} has no {missing}; expected a "
            f"trainer as trl {OLDEST} to 1.16 have it. Upgrade trl or this program, or probe saved "
            "checkpoints offline: entropy-probe run."
        )


def unwrapped_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside accelerate's wrappers."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


@contextmanager
def without_autocast(model: Any) -> Iterator[None]:
    """The model's own forward, for as long as the probe computes.

    accelerate puts autocast into `forward` itself. A change of entropy is the difference of two
    nearly equal numbers, and bf16 has three digits.
    """
    own = vars(model)
    cast, plain = own.get("forward"), own.get("_original_forward")
    if cast is None or plain is None:
        yield
        return
    own["forward"] = plain
    try:
        yield
    finally:
        own["forward"] = cast


class EvaluationPrompts:
    """`count` prompts for a step, as token ids: of the evaluation set, or of the training set.

    Which ones depends on the seed and the step alone, so every rank chooses the same. Those of
    more than `longest` tokens are left out.
    """

    def __init__(self, trainer: Any, count: int, seed: int, longest: int | None = None) -> None:
        self.trainer, self.count, self.seed = trainer, count, seed
        self.longest = longest
        data = trainer.eval_dataset
        if isinstance(data, dict):  # several evaluation sets: the first
            data = next(iter(data.values()), None)
        self.data = trainer.train_dataset if data is None else data
        if not hasattr(self.data, "__len__"):
            raise ValueError(
                "Evaluation prompts cannot be drawn from a dataset without a length (a stream). "
                "Give the trainer an eval_dataset, or the callback evaluation='half' or Rollouts."
            )
        self._source = "train_dataset" if data is None else "eval_dataset"
        if not len(self.data):
            raise ValueError(
                f"The trainer's {self._source} has no rows; expected prompts to evaluate on. Give "
                "it rows, or leave it out: without an eval_dataset, prompts of the training set "
                "are drawn."
            )
        self.count = min(count, len(self.data))
        self._warned_few = self._warned_long = False

    def __call__(self, step: int) -> list[Sequence[int]]:
        rows = chosen_rows(len(self.data), len(self.data), self.seed, step)
        ids = (self._ids(row) for row in rows)
        prompts: dict[tuple[int, ...], None] = {}
        too_long: set[tuple[int, ...]] = set()
        for prompt in ids:
            if self.longest is not None and len(prompt) > self.longest:
                too_long.add(prompt)
                continue
            prompts.setdefault(prompt)
            if len(prompts) == self.count:
                break
        if too_long:
            self._warn_long(max(map(len, too_long)), any_left=bool(prompts))
        self._warn_few(len(prompts))
        return list(prompts)

    def _ids(self, row: int) -> tuple[int, ...]:
        text = self.data[row]["prompt"]
        ids = prompt_ids(self.trainer, text)
        if not ids:
            raise ValueError(
                f"Row {row} of the trainer's {self._source} has the prompt {text!r}, which is no "
                "token; expected at least one. Leave the row out."
            )
        return ids

    def _warn_long(self, length: int, *, any_left: bool) -> None:
        limit = self.trainer.args.max_completion_length
        why = (
            f"a prompt of {length} tokens with max_completion_length = {limit} exceeds the "
            f"model's {(self.longest or 0) + limit} positions"
        )
        advice = "Lower max_completion_length in the trainer's config, or shorten the prompts"
        if not any_left:
            raise ValueError(f"No evaluation prompt is short enough: {why}. {advice}.")
        if not self._warned_long and self.trainer.is_world_process_zero():
            LOG.warning(
                "Evaluation prompts that are too long are left out: %s. %s, to have them in. "
                "(Logged once.)",
                why,
                advice,
            )
        self._warned_long = True

    def _warn_few(self, distinct: int) -> None:
        if distinct >= MIN_PROMPTS or self._warned_few or not self.trainer.is_world_process_zero():
            return
        self._warned_few = True
        LOG.warning(
            "The %d rows that evaluation prompts are drawn from have %d different prompts as token "
            "ids; expected at least %d, below which no row has an interval and none is trusted. "
            "Give the trainer an eval_dataset with more, and check that the tokenizer knows the "
            "prompts' characters. (Logged once.)",
            len(self.data),
            distinct,
            MIN_PROMPTS,
        )


def used_now(trainer: Any) -> tuple[list[int], list[int]]:
    """Places in `_buffered_inputs` that the step at hand learned from, and those it did not."""
    size = trainer.args.steps_per_generation
    done, parts = trainer._step, trainer.current_gradient_accumulation_steps
    used = [k % size for k in range(done - parts, done)]
    return used, [k for k in range(size) if k not in used]


def update_batch(trainer: Any, ranks: Ranks, captures: Captures | None = None) -> UpdateBatch:
    """The rollouts of the step at hand, of all ranks, as the loss saw them."""
    _, rest = used_now(trainer)
    parts = step_microbatches(trainer, ranks, captures)
    return from_trl_inputs(
        parts,
        eos=eos_of(trainer),
        pad=tokenizer_of(trainer).pad_token_id,
        check_items=not rest,
    )


def step_microbatches(
    trainer: Any, ranks: Ranks, captures: Captures | None = None
) -> list[dict[str, Any]]:
    """The microbatches of the step at hand, those of rank 0 first, as the trainer has them."""
    used, _ = used_now(trainer)
    return _everyones(trainer, used, ranks, captures)


def token_divisor(trainer: Any) -> float | None:
    """What dapo and cispo divide by, where a step learns from a part of the generated batch."""
    args = trainer.args
    passes = trainer.current_gradient_accumulation_steps
    items = trainer._buffered_inputs[0].get("num_items_in_batch")
    if items is None or args.steps_per_generation == passes:
        return None
    return max(float(items), 1.0) * passes / args.steps_per_generation


def other_rollouts(trainer: Any, ranks: Ranks) -> Rollouts:
    """Rollouts of the generation batch that the step at hand does not learn from."""
    _, rest = used_now(trainer)
    if not rest:
        raise ValueError(
            "evaluation='half' needs rollouts that a step does not learn from; every step here "
            "learns from all that were generated. Set steps_per_generation to twice "
            "gradient_accumulation_steps, or use evaluation='fresh'."
        )
    batch = from_trl_inputs(
        _everyones(trainer, rest, ranks),
        eos=eos_of(trainer),
        pad=tokenizer_of(trainer).pad_token_id,
        check_items=False,
    )
    return batch.rollouts


def own_batch(trainer: Any, ranks: Ranks, captures: Captures | None = None) -> OwnBatch:
    """The step's own rollouts and the loss they make. Their policy is the one in training, unless
    they are learned from a second time: then the ratio's denominator tells who drew them."""
    batch = update_batch(trainer, ranks, captures)
    facts: JSONObject = dict(trainer_facts(trainer))
    # RLOO has one log-prob per response, which tells nothing about single tokens.
    drawn_NS = None if is_rloo(trainer) else batch.old_logprob_NS
    rollouts = replace(batch.rollouts, behaviour_logprob_NS=drawn_NS)
    return OwnBatch(
        batch=replace(batch, rollouts=rollouts),
        objective=objective_from(facts, divisor=token_divisor(trainer)),
    )


def _everyones(
    trainer: Any, places: Sequence[int], ranks: Ranks, captures: Captures | None = None
) -> list[dict[str, Any]]:
    def mine() -> list[dict[str, Any]]:
        parts = [
            {
                key: value.detach().cpu() if isinstance(value, torch.Tensor) else value
                for key, value in trainer._buffered_inputs[place].items()
                if value is not None
            }
            for place in places
        ]
        return parts if captures is None else captures.with_factors(parts)

    return [part for parts in ranks.all_gather(mine) for part in parts]


def trainer_facts(trainer: Any) -> FactsFile:
    """What decides a step and is in no checkpoint: the contents of entropy_probe.json."""
    args = trainer.args
    facts: dict[str, Any] = {
        **(_rloo_facts() if is_rloo(trainer) else _grpo_facts(args)),
        "clip_low": args.epsilon,
        "clip_high": args.epsilon if args.epsilon_high is None else args.epsilon_high,
        "entropy_coef": entropy_coef(trainer),
        "max_grad_norm": args.max_grad_norm,
        "max_completion_length": args.max_completion_length,
        "num_iterations": args.num_iterations,
        "amp_dtype": computed_in(trainer),
        "temperature": args.temperature,
        "top_p": args.top_p,
        "G": args.num_generations,
        "B_U": args.per_device_train_batch_size
        * args.world_size
        * args.gradient_accumulation_steps
        // args.num_generations,
    }
    return cast(FactsFile, {name: x for name, x in facts.items() if x is not None})


def computed_in(trainer: Any) -> str:
    """The dtype of training's matrix products: autocast's, or that of the model's own weights."""
    if trainer.args.bf16 or trainer.args.fp16:
        return "bfloat16" if trainer.args.bf16 else "float16"
    kinds = {p.dtype for p in trainer.model.parameters()}
    coarse = (kind for kind in (torch.bfloat16, torch.float16) if kind in kinds)
    return str(next(coarse, torch.float32)).removeprefix("torch.")


def _grpo_facts(args: Any) -> dict[str, Any]:
    return {
        "loss": args.loss_type,
        "advantage": {True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards),
        "ratio": args.importance_sampling_level,
        "beta": args.beta,
        "kl_ratio": getattr(args, "use_bias_correction_kl", False),
        "delta": getattr(args, "delta", None),
        "sapo_positive": getattr(args, "sapo_temperature_pos", None),
        "sapo_negative": getattr(args, "sapo_temperature_neg", None),
    }


def _rloo_facts() -> dict[str, Any]:
    """Its KL term is in the reward, and so in the advantages."""
    return {"loss": "rloo", "advantage": "none", "ratio": "sequence", "beta": 0.0}


class Captures:
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._rewards_NF: Tensor | None = None
        passes = trainer.args.gradient_accumulation_steps
        self._masks: dict[str, deque[Tensor]] = {
            name: deque(maxlen=passes) for name in names_of().masks
        }
        self._wrapped: list[str] = []
        self._warned = False
        wraps = {REWARD_METHOD: self._rewarding, GENERATE_METHOD: self._generating}
        for name, wrap in {**wraps, **dict.fromkeys(self._masks, self._masking)}.items():
            original = getattr(trainer, name, None)
            if original is not None and name not in vars(trainer):
                setattr(trainer, name, wrap(name, original))
                self._wrapped.append(name)

    def restore(self) -> None:
        """The trainer has its own methods again."""
        for name in self._wrapped:
            delattr(self.trainer, name)
        self._wrapped = []

    def factors(self, passes: int) -> list[Tensor | None]:
        """Of the step at hand, one for each of its microbatches (this rank's)."""
        factors: list[Tensor | None] = [None] * passes
        for masks in self._masks.values():
            for i, mask_NT in enumerate(list(masks)[-passes:] if masks else ()):
                before = factors[i]
                factors[i] = mask_NT if before is None else before * mask_NT
        return factors

    def with_factors(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            part if factor is None else {**part, POLICY_FACTOR: factor}
            for part, factor in zip(parts, self.factors(len(parts)), strict=True)
        ]

    def _rewarding(self, _: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def rewards(inputs: Any, prompts: Any, *args: Any, **kwargs: Any) -> Tensor:
            rewards_NF = original(inputs, prompts, *args, **kwargs)
            self._rewards_NF = self._kept(lambda: self._own(rewards_NF, len(prompts)), None)
            return rewards_NF

        return rewards

    def _own(self, reward_NF: Tensor, count: int) -> Tensor:
        """Of all ranks' rewards this one's."""
        first = self.trainer.accelerator.process_index * count
        return reward_NF[first : first + count].detach().clone()

    def _kept(self, work: Callable[[], T], otherwise: T) -> T:
        """`work()`; training must not feel that it failed."""
        try:
            return work()
        except Exception as error:  # the trainer is another than we know
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            LOG.log(
                level,
                "Something of this trainer could not be recorded; training goes on. %s: %s",
                type(error).__name__,
                error,
            )
            return otherwise

    def _generating(
        self, _: str, original: Callable[..., Mapping[str, Any]]
    ) -> Callable[..., Mapping[str, Any]]:
        def generated(*args: Any, **kwargs: Any) -> Mapping[str, Any]:
            self._rewards_NF = None
            batch = original(*args, **kwargs)
            return self._kept(lambda: self._with_rewards(batch), batch)

        return generated

    def _with_rewards(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        reward_NF = self._rewards_NF
        if reward_NF is None or len(reward_NF) != len(batch["prompt_ids"]):
            return batch
        weights = getattr(self.trainer, "reward_weights", None)
        weights = [1.0] * reward_NF.shape[1] if weights is None else weights.tolist()
        total_N = weighted_rewards(reward_NF.double(), weights)
        return {**batch, BY_FUNCTION: reward_NF, REWARD: total_N}

    def _masking(self, name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        kept = self._masks[name]

        def masked(*args: Any, **kwargs: Any) -> Tensor:
            mask_NT = original(*args, **kwargs)
            self._kept(lambda: kept.append(mask_NT.detach().to("cpu", torch.float32)), None)
            return mask_NT

        return masked
