"""A user's own training: prompts in a JSONL file with columns of their own, a reward in a file.

    python new_user.py FOLDER

writes FOLDER/prompts.jsonl, FOLDER/project/my_reward.py and FOLDER/base, and trains 12 steps into
FOLDER/run, with a record in FOLDER/run/record and a checkpoint every five steps.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch

from oracles.tiny_models import tiny_model, tiny_tokenizer

REWARD = '''
"""Counts the digits that the task likes."""

from liking import weight_of


def liked_digits(prompts, completions, completion_ids, digit, bonus, **_):
    assert len(prompts) == len(completions) == len(completion_ids) == len(digit) == len(bonus)
    return [
        weight_of(text, d) + b * len(ids) / 100
        for text, ids, d, b in zip(completions, completion_ids, digit, bonus, strict=True)
    ]
'''
HELPER = """
def weight_of(text, digit):
    return sum((ord(letter) + digit) % 7 for letter in text) / 10
"""
STEPS, SAVE = 12, 5


def written(folder: Path) -> Any:
    """The user's files; returns the reward function, imported from its own."""
    rows = [
        {"prompt": f"{a}+{b}=", "digit": (a * b) % 10, "bonus": float(a), "source": "mine"}
        for a in range(1, 8)
        for b in range(1, 8)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    project = folder / "project"
    project.mkdir()
    (project / "my_reward.py").write_text(REWARD)
    (project / "liking.py").write_text(HELPER)
    return imported(project / "my_reward.py")


def imported(file: Path) -> Any:
    """As a script in the project's folder would have it."""
    import sys

    sys.path.insert(0, str(file.parent))
    try:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module.liked_digits


def trainer_of(folder: Path, reward: Any, callback: Any, **changes: Any) -> Any:
    from datasets import load_dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    tiny_model().save_pretrained(folder / "base")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "base")
    settings: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "max_steps": STEPS,
        "save_steps": SAVE,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 12,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
    }
    data = load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train")
    adapter = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(1)  # LoRA's A
    return GRPOTrainer(
        model=str(folder / "base"),
        reward_funcs=reward,
        args=GRPOConfig(**(settings | changes)),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=adapter,
        callbacks=[callback],
    )
