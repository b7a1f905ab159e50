"""`explain` of TRL runs whose optimizer a user made: groups of their own, plain SGD."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from entropy_experiments.config import load_config
from entropy_experiments.online.trl import EntropyProbeCallback
from entropy_experiments.pipelines.explain import ExplainOptions, explain
from oracles.tiny_grpo import grpo
from oracles.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.contract

STEPS = 3
SAME = 1e-3
"""Of rebuilt from recorded steps: rounding of fp32 is below it, another loss far above."""


def two_groups(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Neither the model's order nor the Trainer's groups."""
    few = {"params": params[5:2:-1], "lr": 1e-3, "weight_decay": 0.3}
    rest = {"params": params[:3] + params[6:], "lr": 1e-2, "betas": (0.8, 0.99)}
    return torch.optim.AdamW([few, rest])


def plain_sgd(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=20.0)


def explained(folder: Path, make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    """The middle step from a replayed state."""
    tiny_model().save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    callback = EntropyProbeCallback(every=100, prompts=6, microbatch=4, run_ledger=True)
    with torch.random.fork_rng(devices=[]):
        trainer = grpo(
            folder / "run",
            callbacks=[callback],
            max_steps=STEPS,
            save_strategy="steps",
            save_steps=1,
        )
        trainer.optimizer = make([p for p in trainer.model.parameters() if p.requires_grad])
        trainer.train()
    assert callback.off is None
    changes = {
        "checkpoint.base": str(folder / "base"),
        "data.evaluation_prompts": 6,
        "memory.microbatch_size": 16,
    }
    options = ExplainOptions(start=1, every=STEPS - 1, training_prompts=True)
    return explain(load_config(None).replaced(changes), folder / "run", options, out=folder / "out")


def test_groups_of_ones_own_are_known_by_their_names(tmp_path):
    """torch's file has numbers, and groups of 3 and 9: the callback writes the names beside it."""
    summary = explained(tmp_path, two_groups)
    assert summary["replays"][0]["distance"] < SAME
    assert all(step["step_distance"] < SAME for step in summary["steps"])
    assert summary["steps"][0]["gradient_distance"] < SAME


@pytest.mark.slow
def test_sgd_without_momentum_has_no_moment_to_compare(tmp_path):
    summary = explained(tmp_path, plain_sgd)
    assert all(step["step_distance"] < SAME for step in summary["steps"])
    assert [step["gradient_distance"] for step in summary["steps"]] == [None] * (STEPS - 1)
    assert not [reason for reason in summary["why_not"] if "gradients rebuilt" in reason]
