"""The trainer: TRL's GRPOTrainer with document 001's two sizes that TRL has no name for.

    rollout_batch_size   generation of a step's responses in parts
    tf_micro_batch       sequences per forward pass without gradient

Both change memory and speed. The first also changes which random numbers a response gets.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.integration_utils import get_available_reporting_integrations

from entropy_experiments.checkpoints.base import (
    BACKBONES,
    check_finite_weights,
    check_loaded,
    from_gguf,
    load_causal_lm,
    load_tokenizer,
    smollm2_gguf,
)
from entropy_experiments.checkpoints.runs import EMBEDDED, embedded_trajectory
from entropy_experiments.config.training import TrainingConfig
from entropy_experiments.config.training_batch import BatchPlan
from entropy_experiments.online.train.task import Task, reward_functions, trl_datasets

try:
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer
except ImportError as missing:
    raise ValueError(
        f"Training needs TRL, and it cannot be imported ({missing}). Install the extra: pip "
        "install 'entropy-experiments[trl]'."
    ) from missing

SAME_NAMES = (
    "num_generations",
    "num_iterations",
    "temperature",
    "top_p",
    "max_completion_length",
    "loss_type",
    "scale_rewards",
    "importance_sampling_level",
    "beta",
    "epsilon",
    "epsilon_high",
    "max_grad_norm",
    "max_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "seed",
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "run_name",
    "gradient_checkpointing",
)


class PartwiseGRPOTrainer(GRPOTrainer):
    """Generates `generated_at_once` sequences at a time, scores `scored_at_once`; None: all."""

    generated_at_once: int | None = None
    scored_at_once: int | None = None
    unwatched: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Around generation, which has no gradient for a doctor to follow."""

    def _generate_single_turn(
        self,
        prompt_ids: Any,
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> Any:
        with self.unwatched():
            return self._generated(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images
            )

    def _generated(
        self,
        prompt_ids: Any,
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool,
    ) -> Any:
        size = self.generated_at_once
        plain = not (self.use_vllm or self.use_transformers_continuous_batching)
        if size is None or not plain or images is not None or multimodal_fields:
            return super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images
            )
        completions: list[list[int]] = []
        for start in range(0, len(prompt_ids), size):
            part, _ = super()._generate_single_turn(
                prompt_ids[start : start + size], None, {}, num_generations
            )
            completions += part
        return completions, None

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        """A run that was killed after its last step only has its end to write."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return None
        return super()._run_epoch(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if self.scored_at_once is not None and not torch.is_grad_enabled():
            kwargs["batch_size"] = self.scored_at_once
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


def located(model: str) -> str:
    """Where a model is, by the word of the configuration: a folder, or a name on the hub."""
    if model == EMBEDDED:
        return str(embedded_trajectory() / "base")
    if model == "smollm2":
        return str(from_gguf(smollm2_gguf()))
    if model in BACKBONES:
        return BACKBONES[model]
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return str(from_gguf(path))
    if path.is_dir():
        return os.path.abspath(path)  # adapters name it, and are read from elsewhere
    if model.count("/") == 1 and not model.startswith((".", "/", "~")) and path.suffix != ".gguf":
        return model
    near = get_close_matches(model, [EMBEDDED, *BACKBONES], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise FileNotFoundError(
        f"Model not found: {model!r}; expected {EMBEDDED}, {', '.join(list(BACKBONES)[:3])}, ..., "
        f"a folder with config.json and weights, a .gguf file or a hub name org/model.{hint}"
    )


def load_policy(config: TrainingConfig) -> tuple[Any, Any]:
    """(model, tokenizer), both as the offline commands would read them."""
    if config.dtype == "bfloat16" and not on_gpu(config):
        raise ValueError(
            "dtype is bfloat16 on a CPU; expected float32 there. Steps of a usual learning rate "
            "are lost in its rounding. Set dtype: float32."
        )
    where = located(config.model)
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    model, info = load_causal_lm(where, dtype=dtype)
    check_loaded(where, info, extra_allowed=False)
    check_finite_weights(where, model)
    return model, load_tokenizer([where], model)


def on_gpu(config: TrainingConfig) -> bool:
    return torch.cuda.is_available() and not config.use_cpu


def grpo_settings(config: TrainingConfig, plan: BatchPlan, out: Path) -> GRPOConfig:
    """TRL's own configuration of this run."""
    gpu = on_gpu(config)
    if config.bf16 and not gpu:
        raise ValueError(
            "bf16 is true, and training is on a CPU; expected a GPU. Leave bf16 out: it is on "
            "where a GPU can."
        )
    bf16 = gpu and torch.cuda.is_bf16_supported() if config.bf16 is None else config.bf16
    known = {field.name for field in fields(GRPOConfig) if field.init}
    for name in config.trl:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ValueError(f"trl.{name}: TRL's GRPOConfig has no such field.{hint}")
    settings: dict[str, Any] = {
        **{name: getattr(config, name) for name in SAME_NAMES},
        "output_dir": str(out),
        "per_device_train_batch_size": plan.sequences_per_backward,
        "gradient_accumulation_steps": plan.accumulation,
        "steps_per_generation": plan.steps_per_generation,
        "reward_weights": None if config.reward_weights is None else list(config.reward_weights),
        "bf16": bf16,
        "use_cpu": not gpu,
        "save_strategy": "steps",
        "report_to": _trackers(config),
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
        "shuffle_dataset": False,  # the list of prompts is in its order
        **config.trl,
    }
    if config.gradient_checkpointing:
        # The other kind hides parameters from torch.autograd.grad.
        settings.setdefault("gradient_checkpointing_kwargs", {"use_reentrant": False})
    return GRPOConfig(**settings)


def _trackers(config: TrainingConfig) -> list[str]:
    wanted = [name for name in config.report_to if name != "none"]
    installed = get_available_reporting_integrations()
    for name in wanted:
        if name not in installed:
            raise ValueError(
                f"report_to: got {name!r}, expected one of the trackers that are installed: "
                f"{', '.join(installed) or 'none is'}. Install it, or leave it out: the metrics "
                "are in trainer_state.json of each checkpoint as well."
            )
    return wanted


def build_trainer(
    config: TrainingConfig,
    plan: BatchPlan,
    task: Task,
    policy: tuple[Any, Any],
    out: Path,
    *,
    callbacks: list[Any],
) -> PartwiseGRPOTrainer:
    model, tokenizer = policy
    settings = grpo_settings(config, plan, out)
    adapter = None
    if config.lora is not None:
        from peft import LoraConfig

        chosen, alpha = list(config.lora.target_modules), float(config.lora.alpha)
        adapter = LoraConfig(
            r=config.lora.r,
            lora_alpha=int(alpha) if alpha.is_integer() else alpha,  # type: ignore[arg-type]
            lora_dropout=config.lora.dropout,
            target_modules="all-linear" if chosen == ["all-linear"] else chosen,
            task_type="CAUSAL_LM",
        )
    prompts = plan.prompts_per_generation * plan.generations(config.max_steps)
    training, evaluation = trl_datasets(task, prompts=prompts)
    trainer = PartwiseGRPOTrainer(
        model=model,
        reward_funcs=reward_functions(task),  # pyright: ignore[reportArgumentType]
        args=settings,
        train_dataset=training,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        peft_config=adapter,
        callbacks=callbacks,
    )
    if config.rollout_batch_size is not None:
        trainer.generated_at_once = config.rollout_batch_size * config.num_generations
    trainer.scored_at_once = config.tf_micro_batch
    return trainer
