"""A GRPOTrainer on a tiny model that trains in milliseconds a step, for the online probe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from entropy_experiments.models.precision import true_float64
from oracles.tiny_models import tiny_model, tiny_tokenizer

PROMPTS = ["1+2=", "12*3=", "4-1=", "(1+2)*34=", "9=", "8/4=", "7+7=", "2*(3-1)="]


def reward(completions: list[str], **_: Any) -> list[float]:
    # Characters weigh differently, so that a group's rewards are hardly ever equal.
    return [sum(ord(letter) % 7 for letter in text) / 10 for text in completions]


def grpo(
    folder: Path,
    *,
    callbacks: list[Any],
    lora: bool = True,
    lora_dropout: float = 0.0,
    double: bool = False,
    kind: Any = None,
    rewards: Any = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """A trainer whose every random number follows from the seed. `double`: all of it in fp64.

    `kind`: another trainer than GRPOTrainer; `rewards`: other reward functions; `dtype`: of the
    model's weights, below LoRA's.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    kind = GRPOTrainer if kind is None else kind
    config = RLOOConfig if issubclass(kind, RLOOTrainer) else GRPOConfig

    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.1,
        "max_grad_norm": 0.05,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 12,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
    }
    model, tokenizer = tiny_model().to(dtype), tiny_tokenizer()
    adapter = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=lora_dropout,
        target_modules=["q_proj", "v_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    if double:
        true_float64(model.double())
    torch.manual_seed(1)  # LoRA's A
    trainer = kind(
        model=model,
        reward_funcs=reward if rewards is None else rewards,
        args=config(**(settings | changes)),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS] * 4),
        processing_class=tokenizer,
        peft_config=adapter if lora else None,
        callbacks=callbacks,
    )
    if double:
        trainer.model.double()  # the adapter too
    return trainer


def outcome(trainer: Any) -> dict[str, Any]:
    """All that training leaves behind: weights, optimizer state, and its own metrics."""
    history = [{k: v for k, v in row.items() if not _aside(k)} for row in trainer.state.log_history]
    return {
        "weights": {n: p.detach().clone() for n, p in trainer.model.named_parameters()},
        "optimizer": trainer.optimizer.state_dict()["state"],
        "history": history,
        "rng": torch.random.get_rng_state(),
    }


def _aside(name: str) -> bool:
    timed = ("time", "runtime", "per_second")
    return name.startswith(("entropy_probe/", "simple_entropy_")) or any(t in name for t in timed)


def assert_same_outcome(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Bit for bit."""
    assert a["weights"].keys() == b["weights"].keys()
    for name, value in a["weights"].items():
        assert torch.equal(value, b["weights"][name]), name
    assert a["optimizer"].keys() == b["optimizer"].keys()
    for key, entry in a["optimizer"].items():
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b["optimizer"][key][name]))
    assert a["history"] == b["history"]
    assert torch.equal(a["rng"], b["rng"])
