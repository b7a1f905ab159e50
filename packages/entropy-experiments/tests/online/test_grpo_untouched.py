"""Fifty GRPO steps with the probe (sampling, recording and checkpoints included) and without it.

Weights, optimizer state, logged metrics and every global random number are the same, bit for bit:
in one process, under gradient checkpointing of either kind, and on two ranks. Six steps of this are
in the fast tier (tests/online/test_trl_online.py).
"""

from __future__ import annotations

import math
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from oracles.tiny_grpo import assert_same_outcome, grpo, outcome
from oracles.tiny_models import VOCABULARY
from oracles.trl_ranks import on_trl_ranks

pytestmark = pytest.mark.invariant

STEPS = 50


def _checkpointing(reentrant: bool) -> dict[str, Any]:
    return {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
    }


KINDS = {
    "plain": {},
    "checkpointing": _checkpointing(False),
    "reentrant checkpointing": _checkpointing(True),
}


def _trained(folder: Path, *callbacks: Any, **changes: Any) -> dict[str, Any]:
    trainer = grpo(folder, callbacks=list(callbacks), **changes)
    trainer.train()
    numpy_state: Any = np.random.get_state()
    return {
        **outcome(trainer),
        "python": random.getstate(),
        "numpy": numpy_state[1].tolist(),
        "grad": [p.grad for p in trainer.model.parameters()],
        "modes": {name: module.training for name, module in trainer.model.named_modules()},
    }


def _compared(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """Both runs, compared; the rows of the one with the probe."""
    from entropy_experiments.online.trl import EntropyProbeCallback

    changes = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 25} | changes
    probe = EntropyProbeCallback(
        max_overhead=None, prompts=6, microbatch=4, record=folder / "record"
    )
    seen = _trained(folder / "on", probe, **changes)
    plain = _trained(folder / "off", **changes)
    assert probe.off is None
    assert_same_outcome(seen, plain)
    for name in ("python", "numpy", "modes"):
        assert seen[name] == plain[name], name
    for a, b in zip(seen["grad"], plain["grad"], strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)
    return probe.rows


def _check(rows: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in rows] == list(range(STEPS))
    for row in rows:
        assert 0 <= row["entropy"] <= math.log(VOCABULARY)
        assert row["step_mismatch"] < 1e-3
        assert row["rollouts"] == 6
    assert any(row["predicted"] != 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fifty_steps_in_one_process(kind, tmp_path):
    with torch.random.fork_rng(devices=[]):
        _check(_compared(tmp_path, **KINDS[kind]))


def _on_a_rank(root: Path, kinds: tuple[str, ...]) -> list[Any]:
    """The rows of each kind; both ranks write where rank 0 says."""
    found = []
    for kind in kinds:
        folder: list[Any] = [tempfile.mkdtemp(dir=root)]
        torch.distributed.broadcast_object_list(folder, src=0)
        changes = {"per_device_train_batch_size": 4, **KINDS[kind]}
        found.append(_compared(Path(folder[0]), **changes))
    return found


@pytest.mark.slow
def test_fifty_steps_on_two_ranks(tmp_path):
    kinds = ("plain", "checkpointing")
    first, second = on_trl_ranks(2, _on_a_rank, tmp_path, kinds, patience=900)
    for rows in first:
        _check(rows)
    assert second == [[], []]  # rank 0 keeps the rows


class OneNumber(TrainerCallback):
    """A probe that draws one global random number, in one step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            torch.rand(1)


class OneMode(TrainerCallback):
    """A probe that forgets to put training mode back."""

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        if state.global_step == 0:
            model.eval()


class OneGradient(TrainerCallback):
    """Document 001's: gradients are gone between backward and step."""

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        if state.global_step == 0:
            model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("disturber", [OneNumber, OneMode, OneGradient])
def test_has_teeth(disturber, tmp_path):
    with torch.random.fork_rng(devices=[]):
        plain = _trained(tmp_path / "off", max_steps=2)
        disturbed = _trained(tmp_path / "on", disturber(), max_steps=2)
    with pytest.raises(AssertionError):
        assert_same_outcome(plain, disturbed)
