"""The trainer and its task: TRL's GRPOTrainer, the prompts of every step, the reward functions.

The trainer has document 001's two sizes that TRL has no name for:

    rollout_batch_size   generation of a step's responses in parts
    tf_micro_batch       sequences per forward pass without gradient

Both change memory and speed. The first also changes which random numbers a response gets.

The prompts of a whole run are one list, as long as the run, in an order that follows from the seed:
TRL walks through it once. So a resumed run finds its place by counting, and a longer run begins
like a shorter one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from difflib import get_close_matches
from itertools import chain, count, islice
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
from entropy_experiments.checkpoints.training_facts import FactsFile
from entropy_experiments.config.training import TrainingConfig
from entropy_experiments.config.training_batch import BatchPlan
from entropy_experiments.sampling.datasets import Problem, load_problems
from entropy_experiments.sampling.rewards import build_reward, default_functions

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
MOST_MADE = 4096
"""Problems that are made here, unless dataset_size says more; then they come again."""
ENDLESS = ("countdown", "reasoning_gym:")


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


@dataclass(frozen=True, kw_only=True)
class Task:
    training: tuple[Problem, ...]
    """Different problems, in the order of their first appearance."""
    held_out: tuple[Problem, ...]
    functions: tuple[str, ...]
    weights: tuple[float, ...] | None
    seed: int

    def sequence(self, prompts: int) -> list[int]:
        """Places in `training` of the prompts of a run, one after the other."""
        rounds = chain.from_iterable(self._round(n) for n in count())
        return list(islice(rounds, prompts))

    def _round(self, number: int) -> Iterator[int]:
        places = range(len(self.training))
        if not number:  # they come in the order of the seed already
            return iter(places)

        def key(place: int) -> bytes:
            name = f"{self.seed} {number} {self.training[place].id}"
            return hashlib.sha256(name.encode()).digest()

        return iter(sorted(places, key=key))

    def facts(self, config: TrainingConfig) -> FactsFile:
        """What `entropy_probe.json` says of the task."""
        facts: FactsFile = {"dataset_name": config.dataset_name}
        notes = []
        if config.dataset_path is not None:
            facts["dataset_path"] = _absolute(config.dataset_path)
        if config.split is not None:
            facts["split"] = config.split
        code = [name for name in self.functions if ":" in name]
        if code:  # a file beside a checkpoint cannot have code imported
            notes.append(
                f"training was rewarded by {', '.join(self.functions)}; data.reward_functions "
                "must name code of one's own"
            )
        else:
            facts["reward_functions"] = list(self.functions)
            if self.weights is not None:
                facts["reward_weights"] = list(self.weights)
        if config.chat_template:
            notes.append("prompts were in the chat template: set data.chat_template: true")
        if notes:
            facts["note"] = notes
        return facts


def load_task(config: TrainingConfig, plan: BatchPlan, *, tokenizer: Any = None) -> Task:
    needed = plan.prompts_per_generation * plan.generations(config.max_steps)
    size = config.dataset_size
    count = None if size is None else size + config.eval_prompts
    if count is None and config.dataset_name.startswith(ENDLESS):
        count = min(needed, MOST_MADE) + config.eval_prompts
    problems = load_problems(
        config.dataset_name,
        path=config.dataset_path,
        split=config.split,
        count=count,
        seed=config.seed,
        tokenizer=tokenizer,
        chat=config.chat_template,
    )
    least = config.eval_prompts + plan.prompts_per_generation
    if len(problems) < least:
        raise ValueError(
            f"{config.dataset_name} has {len(problems)} different problems; {config.eval_prompts} "
            f"for the probe (eval_prompts) and {plan.prompts_per_generation} for one generation "
            "are needed. Lower eval_prompts or buffer_size, or give a larger dataset."
        )
    functions = config.reward_functions or default_functions(config.dataset_name)
    build_reward(functions, config.reward_weights)  # an unknown one is refused now
    return Task(
        training=tuple(problems[config.eval_prompts :]),
        held_out=tuple(problems[: config.eval_prompts]),
        functions=tuple(functions),
        weights=config.reward_weights,
        seed=config.seed,
    )


def reward_functions(task: Task) -> list[Callable[..., list[float]]]:
    """One for each name, as TRL calls them; it weighs and adds them up."""
    return [_reward(name, task.training) for name in task.functions]


def _reward(name: str, problems: Sequence[Problem]) -> Callable[..., list[float]]:
    reward = build_reward((name,))

    def score(completions: list[str], problem: list[int], **_: Any) -> list[float]:
        chosen = [problems[place] for place in problem]
        return reward(completions, chosen).total_N.tolist()

    score.__name__ = name  # TRL logs it under this name
    return score


def trl_datasets(task: Task, *, prompts: int) -> tuple[Any, Any]:
    """(training, evaluation) as TRL reads them; the second None if nothing is held out."""
    from datasets import Dataset

    problems = task.sequence(prompts)
    training = Dataset.from_dict(
        {"prompt": [task.training[place].prompt for place in problems], "problem": problems}
    )
    if not task.held_out:
        return training, None
    return training, Dataset.from_dict({"prompt": [p.prompt for p in task.held_out]})


def _absolute(path: str) -> str:
    """The offline commands may be run from elsewhere."""
    from pathlib import Path

    return str(Path(path).absolute())
