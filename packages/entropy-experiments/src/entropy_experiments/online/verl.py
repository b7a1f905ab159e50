"""verl's batches and settings as the record holds them; nothing here imports verl.

    with recorder.step(lambda: verl_batch(data)):        # in the worker, or a trainer of your own
        optimizer.step()

`record_engine` does that to an engine of verl's workers (`verl.workers.engine`): its `train_batch`
gets the rollouts of one optimizer step, and its optimizer steps inside. On the driver, where there
are neither weights nor gradients, `verl_dataset.RecordingDataset` keeps the batches.

Fields (verl 0.9; a DataProto, its TensorDict, or a mapping; padded or jagged):

    prompts [N, P], responses [N, T]        padded on the left, on the right
    attention_mask [N, P + T]               of both
    response_mask [N, T]                    tokens of the policy that the loss counts
    old_log_probs, advantages [N, T]        ref_log_prob [N, T] with a KL loss
    rollout_is_weights [N, T]               multiplied into the advantages: it is >= 0
    token_level_scores [N, T]               summed: the reward
    uid                                     equal for the responses to one prompt

Losses: verl divides by the tokens (or sequences) of the whole mini-batch, of all ranks and
microbatches, so that its aggregation modes are losses of `update.objective`; an entropy bonus is
divided alike, which `update.objective` has for the first of them alone:

    token-mean             dapo         seq-mean-token-mean        grpo
    seq-mean-token-sum     luspo        seq-mean-token-sum-norm    dr_grpo
    clip_ratio_c           delta: both bound the ratio where the advantage is negative
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.checkpoints.training_facts import FactsFile
from entropy_experiments.online.step_recorder import StepRecorder
from entropy_experiments.sampling.tensor_batches import batch_from_tensors
from entropy_experiments.types import UpdateBatch

LOSS_OF = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum": "luspo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
NEEDED = ("prompts", "responses", "response_mask", "advantages")
PER_TOKEN = ("response_mask", "advantages", "old_log_probs", "ref_log_prob", "rollout_is_weights")
K3 = ("low_var_kl", "k3")


def verl_batch(data: Any, *, eos: int | Sequence[int] | None = None) -> UpdateBatch:
    """The update batch of verl's data, copied to the CPU.

    Args:
        data: A DataProto, its TensorDict, or a mapping of the same fields, of one optimizer step.
        eos: Ids that end a response: one without any was truncated. None: none was.

    Returns:
        The batch, as the mathematics reads it.

    Raises:
        ValueError: If a field is missing, or shapes do not fit together.

    Examples:
        >>> import torch
        >>> batch = verl_batch(
        ...     {
        ...         "prompts": torch.tensor([[0, 5], [5, 6]]),
        ...         "responses": torch.tensor([[7, 8], [9, 0]]),
        ...         "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]]),
        ...         "response_mask": torch.tensor([[1, 1], [1, 0]]),
        ...         "advantages": torch.tensor([[1.0, 1.0], [-1.0, 0.0]]),
        ...     }
        ... )
        >>> batch.rollouts.tokens_N.tolist()
        [2, 1]
    """
    tensors, others = _fields(data)
    missing = [name for name in NEEDED if name not in tensors]
    if missing:
        raise ValueError(
            f"verl's batch lacks {missing}; got {sorted(tensors)}. Expected the data of an actor "
            "update, after advantages were computed."
        )
    whole = _whole(tensors)
    response_NS, counted_NS = whole["drawn"].bool(), whole["response_mask"].bool()
    # Rejected rollouts have an empty mask: they were drawn, and the loss counts none of them.
    # Holes are tool outputs, which the policy did not draw.
    emptied_N1 = ~counted_NS.any(1, keepdim=True)
    response_NS = torch.where(emptied_N1, response_NS, counted_NS)
    advantage_NS = whole["advantages"]
    if "rollout_is_weights" in whole:
        advantage_NS = advantage_NS * whole["rollout_is_weights"]
    rewards = None
    if "token_level_scores" in tensors:
        scores = tensors["token_level_scores"]
        rewards = torch.stack([row.float().sum() for row in _rows(scores)])
    uid = others.get("uid")
    batch = batch_from_tensors(
        input_ids=whole["input_ids"],
        attention_mask=whole["attention_mask"],
        response_mask=response_NS,
        advantages=advantage_NS,
        old_logprobs=whole.get("old_log_probs"),
        ref_logprobs=whole.get("ref_log_prob"),
        rewards=rewards,
        loss_mask=counted_NS,
        prompt_index=uid,
        eos=eos,
    )
    if uid is None:
        return batch
    return replace(batch, rollouts=replace(batch.rollouts, uid=tuple(map(str, uid))))


@dataclass(frozen=True, kw_only=True)
class VerlSettings:
    """What verl's configuration says of a step, under the names of the training facts."""

    facts: FactsFile
    unfollowed: tuple[str, ...]
    """Settings of the loss that the offline commands do not rebuild, in words."""


def verl_settings(config: Any) -> VerlSettings:
    """The training facts of verl's configuration.

    Args:
        config: The whole of it: an OmegaConf, or mappings.

    Returns:
        Facts for `StepRecorder`, and what of the loss is not followed.

    Examples:
        >>> actor = {"clip_ratio": 0.2, "clip_ratio_high": 0.28, "loss_agg_mode": "token-mean"}
        >>> settings = verl_settings({"actor_rollout_ref": {"actor": actor}})
        >>> settings.facts["loss"], settings.facts["clip_high"], settings.unfollowed
        ('dapo', 0.28, ())
    """
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

    def value(path: str, default: Any = None) -> Any:
        found = _at(config, path)
        return default if found is None else found

    mode = value(f"{actor}.loss_agg_mode", "token-mean")
    limit = value("data.max_response_length", value(f"{rollout}.response_length"))
    clip = value(f"{actor}.clip_ratio", 0.2)
    with_kl = bool(value(f"{actor}.use_kl_loss", False))
    bonus = float(value(f"{actor}.entropy_coeff", 0.0))
    group = value(f"{rollout}.n", 1)
    facts: dict[str, Any] = {
        "loss": LOSS_OF.get(mode),
        "advantage": _advantage(value),
        "clip_low": value(f"{actor}.clip_ratio_low", clip),
        "clip_high": value(f"{actor}.clip_ratio_high", clip),
        "delta": value(f"{actor}.clip_ratio_c", 3.0),
        "ratio": "token",
        "beta": float(value(f"{actor}.kl_loss_coef", 0.001)) if with_kl else 0.0,
        "kl_ratio": False,
        "entropy_coef": bonus,
        "max_grad_norm": value(f"{actor}.optim.clip_grad", value(f"{actor}.grad_clip")),
        "max_completion_length": limit,
        "num_iterations": value(f"{actor}.ppo_epochs", 1),
        "temperature": value(f"{rollout}.temperature"),
        "top_p": value(f"{rollout}.top_p"),
        "G": group if group > 1 else None,  # the facts know groups only
        "B_U": value(f"{actor}.ppo_mini_batch_size"),
        "amp_dtype": _DTYPES.get(str(value(f"{actor}.fsdp_config.dtype"))),
    }
    facts = {name: _plain(fact) for name, fact in facts.items() if fact is not None}
    return VerlSettings(facts=facts, unfollowed=tuple(_unfollowed(value, mode, limit, bonus)))  # type: ignore[arg-type]


def record_engine(
    engine: Any,
    folder: str,
    config: Any,
    *,
    tokenizer: Any = None,
    first_step: int | None = None,
) -> StepRecorder:
    """Record every optimizer step of an engine of verl's workers.

    Its `train_batch` and its optimizer's `step` are wrapped on the instances; arguments and results
    pass through untouched. Call it on every rank, when the engine is initialised; call
    `recorder.saved(global_step_N)` where checkpoints are written, and `recorder.resumed` where one
    is loaded. Steps are the optimizer's: of each batch as many as it has mini-batches, times
    `ppo_epochs`.

    Args:
        engine: With `module`, `optimizer` and `train_batch(data, loss_function)`.
        folder: Of the record.
        config: verl's whole configuration.
        tokenizer: For its end-of-sequence token.
        first_step: Optimizer steps made before. None: as its state counts them.

    Returns:
        The recorder.

    Examples:
        >>> recorder = record_engine(engine, "run/record", config)  # doctest: +SKIP
    """
    settings = verl_settings(config)
    optimizer = engine.optimizer
    recorder = StepRecorder(
        folder,
        engine.module,
        optimizer,
        facts=settings.facts,
        unfollowed=settings.unfollowed,
        whole_batch=True,
        first_step=first_step,
    )
    eos = getattr(tokenizer, "eos_token_id", None)
    train_batch, step = engine.train_batch, optimizer.step
    current: list[Any] = []

    @functools.wraps(train_batch)
    def recorded_batch(data: Any, *args: Any, **kwargs: Any) -> Any:
        current[:] = [data]
        try:
            return train_batch(data, *args, **kwargs)
        finally:
            current.clear()

    @functools.wraps(step)
    def recorded_step(_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not current:  # not of a batch
            return step(*args, **kwargs)
        with recorder.step(lambda: verl_batch(current[0], eos=eos)):
            return step(*args, **kwargs)

    engine.train_batch = recorded_batch
    # A method, as it was: torch's schedulers look for its __func__.
    optimizer.step = types.MethodType(recorded_step, optimizer)
    return recorder


# inside

_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "bf16": "bfloat16", "fp16": "float16"}


def _advantage(value: Callable[..., Any]) -> str | None:
    """How a group's rewards become advantages, where that is known here."""
    if value("algorithm.adv_estimator") != "grpo":
        return None
    return "group" if value("algorithm.norm_adv_by_std_in_grpo", True) else "none"


def _unfollowed(value: Callable[..., Any], mode: str, limit: int | None, bonus: float) -> list[str]:
    actor = "actor_rollout_ref.actor"
    words: list[str] = []
    if mode not in LOSS_OF:
        words.append(f"loss_agg_mode = {mode}")
    kind = value(f"{actor}.policy_loss.loss_mode", "vanilla")
    if kind != "vanilla":
        words.append(f"policy_loss.loss_mode = {kind}")
    scale = value(f"{actor}.loss_scale_factor")
    if mode == "seq-mean-token-sum-norm" and scale is not None and scale != limit:
        words.append(f"loss_scale_factor = {scale}")
    if mode == "seq-mean-token-sum-norm" and scale is None and value("trainer.use_v1", False):
        # of unpadded responses, each microbatch is divided by its own longest one
        words.append("loss_scale_factor = null with trainer.use_v1")
    if value(f"{actor}.use_kl_loss", False):
        name = value(f"{actor}.kl_loss_type", "low_var_kl")
        if name not in K3:
            words.append(f"kl_loss_type = {name}")
    if bonus and mode != "token-mean":
        words.append(f"entropy_coeff = {bonus:g} with loss_agg_mode = {mode}")
    if value("algorithm.rollout_correction.bypass_mode", False):
        words.append("rollout_correction.bypass_mode")
    return words


def _fields(data: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, others) by name."""
    batch = getattr(data, "batch", None)
    source = data if batch is None or callable(batch) else batch
    tensors = {str(key): source[key] for key in source.keys()}  # noqa: SIM118  (no mapping)
    others = {name: x for name, x in tensors.items() if not isinstance(x, Tensor)}
    others |= dict(getattr(data, "non_tensor_batch", None) or {})
    return {name: x for name, x in tensors.items() if isinstance(x, Tensor)}, others


def _rows(value: Tensor) -> Sequence[Tensor]:
    return value.detach().cpu().unbind(0)


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """[N, S] of prompts and responses without padding between them, padded on the right."""
    prompts, responses = _prompts(tensors), _responses(tensors)
    width = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))

    def padded(rows: Sequence[Tensor]) -> Tensor:
        return torch.stack([torch.nn.functional.pad(x, (0, width - len(x))) for x in rows])

    pairs = list(zip(prompts, responses, strict=True))
    out = {
        "input_ids": padded([torch.cat(pair) for pair in pairs]),
        "attention_mask": padded([torch.ones(len(p) + len(r)) for p, r in pairs]),
        "drawn": padded([torch.cat([torch.zeros(len(p)), torch.ones(len(r))]) for p, r in pairs]),
    }
    for name in PER_TOKEN:
        if name not in tensors:
            continue
        # Padded fields are as wide as the padded responses.
        cut = [x[: len(r)] for x, r in zip(_rows(tensors[name]), responses, strict=True)]
        short = [i for i, (x, r) in enumerate(zip(cut, responses, strict=True)) if len(x) < len(r)]
        if short:
            raise ValueError(
                f"{name} of rollout {short[0]} has {len(cut[short[0]])} entries; expected one for "
                f"each of {len(responses[short[0]])} response tokens."
            )
        out[name] = padded(
            [torch.cat([x.new_zeros(len(p)), x]) for x, p in zip(cut, prompts, strict=True)]
        )
    return out


def _prompts(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    prompts = tensors["prompts"]
    if prompts.is_nested:
        return list(_rows(prompts))
    width = prompts.shape[1]
    return [
        ids[mask[:width].bool()]
        for ids, mask in zip(_rows(prompts), _rows(_attention(tensors)), strict=True)
    ]


def _responses(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    responses = tensors["responses"]
    if responses.is_nested:
        return list(_rows(responses))
    width = responses.shape[1]
    return [
        ids[: int(mask[-width:].sum())]
        for ids, mask in zip(_rows(responses), _rows(_attention(tensors)), strict=True)
    ]


def _attention(tensors: Mapping[str, Tensor]) -> Tensor:
    if "attention_mask" not in tensors:
        raise ValueError(
            f"verl's padded batch lacks attention_mask; got {sorted(tensors)}. Expected it, to "
            "tell tokens from padding."
        )
    return tensors["attention_mask"]


def _at(config: Any, path: str) -> Any:
    """A value of nested mappings or objects; None: it is not there."""
    node = config
    for name in path.split("."):
        if node is None:
            return None
        node = node.get(name) if hasattr(node, "get") else getattr(node, name, None)
    return node


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
