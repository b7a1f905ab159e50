"""Options of a TRL trainer that change its loss or its sampling, and which of them are followed."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, get_args

import torch

from entropy_experiments.loss_names import Loss
from entropy_experiments.online.trl_versions import installed_trl, is_kind, names_of

LOSS_METHODS = (
    "compute_loss",
    "_compute_loss",
    "training_step",
    "_get_per_token_logps_and_entropies",
)
"""A subclass that has its own is one whose loss nobody here knows."""
OPTIONS = (
    *("loss_type", "scale_rewards", "epsilon", "epsilon_high", "delta", "beta"),
    *("importance_sampling_level", "top_entropy_quantile", "mask_truncated_completions"),
    *("sapo_temperature_pos", "sapo_temperature_neg", "use_bias_correction_kl"),
    *("entropy_coef", "use_adaptive_entropy", "off_policy_mask_threshold"),
    *("multi_objective_aggregation", "normalize_advantages", "reward_clip_range"),
    *("num_iterations", "num_generations", "steps_per_generation"),
    *("gradient_accumulation_steps", "per_device_train_batch_size", "world_size"),
    *("max_grad_norm", "max_completion_length", "bf16", "fp16", "disable_dropout"),
    *("gradient_checkpointing", "neftune_noise_alpha", "use_vllm", "use_liger_kernel"),
    *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs"),
    *("chat_template_kwargs", "sync_ref_model", "router_aux_loss_coef"),
)
"""Recorded as they stand, whether this program follows them or not."""
HARMLESS: dict[str, tuple[Any, ...]] = {
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "generation_kwargs": (None, {}),
}
"""Options of the sampling distribution, and where they leave it as it is."""
INHERITED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff", "min_length"), (0,)),
    **dict.fromkeys(("top_k", "min_new_tokens", "no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("num_beams", "num_beam_groups"), (1,)),
    **{name: ([],) for name in ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens")},
    **{name: ([], {}) for name in ("sequence_bias", "exponential_decay_length_penalty")},
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "top_h"), ()),
    **dict.fromkeys(("penalty_alpha", "watermarking_config"), ()),
}
"""The same of a generation config: by its names, the values that change nothing besides None."""


def recorded_options(args: Any) -> dict[str, Any]:
    values = {name: getattr(args, name) for name in OPTIONS if hasattr(args, name)}
    return {name: value if _plain(value) else str(value) for name, value in values.items()}


def recorded_trainer(trainer: Any) -> dict[str, str]:
    kind = type(trainer)
    return {
        "class": kind.__name__,
        "module": kind.__module__,
        "trl": installed_trl(),
        "transformers": version("transformers"),
    }


def is_rloo(trainer: Any) -> bool:
    return is_kind(trainer, ("RLOOTrainer",))


def unfollowed(trainer: Any) -> list[str]:
    """What makes this trainer's loss another than the one that is rebuilt from its batch."""
    args, settings = trainer.args, []
    if (name := own_loss(trainer)) is not None:
        settings.append(f"{type(trainer).__name__} has a {name} of its own")
    loss = getattr(args, "loss_type", "grpo")
    if loss not in get_args(Loss):
        settings.append(f"loss_type = {loss}")
    quantile = getattr(args, "top_entropy_quantile", 1.0)
    if quantile < 1 and _has_bonus(trainer):
        settings.append(f"top_entropy_quantile = {quantile:g} together with an entropy bonus")
    if getattr(trainer, "aux_loss_enabled", False):
        settings.append("the router's auxiliary loss")
    if getattr(args, "neftune_noise_alpha", None):
        settings.append(f"neftune_noise_alpha = {args.neftune_noise_alpha}")
    return settings


def rounded_steps(model: Any) -> list[str]:
    """Trained weights with fewer digits than fp32, to which the optimizer rounds its step."""
    kinds = {p.dtype for p in model.parameters() if p.requires_grad}
    return [
        f"rounding of every step to {str(kind).removeprefix('torch.')} weights"
        for kind in sorted(kinds & {torch.bfloat16, torch.float16}, key=str)
    ]


def sampled_otherwise(trainer: Any) -> list[str]:
    """Options that make the sampling distribution another than the policy's own.

    Those of the trainer's arguments, and those that generation takes from the model's own config.
    """
    args = trainer.args
    settings = [
        f"{name} = {getattr(args, name)}"
        for name, harmless in HARMLESS.items()
        if getattr(args, name, None) not in harmless
    ]
    top_p = getattr(args, "top_p", 1.0)
    return [
        *([f"top_p = {top_p:g}"] if top_p is not None and top_p < 1 else []),
        *settings,
        *_inherited(trainer),
    ]


def _inherited(trainer: Any) -> list[str]:
    """Options of `model.generation_config` that transformers' generate takes where TRL sets none.

    It takes them where the trainer's own config has the default: None, or before transformers 5
    the value of an empty config (top_k 50), which None then replaces.
    Another engine (vLLM) has no `trainer.generation_config`, and does not read the model's.
    """
    explicit = getattr(trainer, "generation_config", None)
    own = getattr(trainer.model, "generation_config", None)
    if explicit is None or own is None:
        return []
    named = getattr(trainer, "generation_kwargs", None) or {}
    default = type(explicit)()
    settings = []
    for name, harmless in INHERITED.items():
        if name in named or getattr(explicit, name, None) != getattr(default, name, None):
            continue
        value = getattr(own, name, None)
        if value not in (None, *harmless):
            settings.append(f"{name} = {value} (the model's generation_config)")
    return settings


def own_loss(trainer: Any) -> str | None:
    """The method by which a subclass replaces TRL's loss."""
    for kind in type(trainer).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in ("trl", "transformers"):
            return None
        if package == "entropy_experiments":  # `train`'s own, whose loss is TRL's in parts
            continue
        for name in LOSS_METHODS:
            if name in vars(kind):
                return name
    return None


def entropy_coef(trainer: Any) -> float:
    """As the next step applies it: an adaptive one changes from step to step."""
    args = trainer.args
    coef = getattr(trainer, "entropy_coef", getattr(args, "entropy_coef", None)) or 0.0
    if getattr(args, "use_adaptive_entropy", False):
        seen = getattr(trainer, names_of().last_entropy or "", float("inf"))  # inf: none yet
        coef = coef if seen <= args.entropy_target else 0.0
    return float(coef)


def _has_bonus(trainer: Any) -> bool:
    return bool(getattr(trainer, "_entropy_bonus_enabled", False))


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | dict)
