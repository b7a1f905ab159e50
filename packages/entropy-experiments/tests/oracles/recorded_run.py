"""A small run that TRL made, with what `entropy-probe explain` needs of each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import TrainerCallback

from entropy_experiments.online.trl import EntropyProbeCallback
from oracles.tiny_grpo import grpo
from oracles.tiny_models import tiny_model, tiny_tokenizer


def record_run(folder: Path, steps: int, others: Sequence[TrainerCallback] = ()) -> None:
    """`run`, with a checkpoint after every step, and the model's `base` beside it."""
    tiny_model().save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    callback = EntropyProbeCallback(every=100, prompts=6, microbatch=4, run_ledger=True)
    with torch.random.fork_rng(devices=[]):
        trainer = grpo(
            folder / "run",
            callbacks=[callback, *others],
            max_steps=steps,
            save_strategy="steps",
            save_steps=1,
        )
        trainer.train()
    assert callback.off is None


def explain_words(folder: Path, out: Path, *more: str) -> list[str]:
    """Arguments of the command that explains it, from checkpoint 2 on."""
    return [
        *("explain", str(folder / "run"), "--from", "2", "--training-prompts", *more),
        *("--out", str(out), "--set", f"checkpoint.base={folder / 'base'}"),
        *("--set", "data.evaluation_prompts=6", "--set", "memory.microbatch_size=16"),
    ]
