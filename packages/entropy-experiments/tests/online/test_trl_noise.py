"""The noise scale inside a real GRPOTrainer: the core's numbers, and training left as it was."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from entropy_experiments.online.noise_scale import NoiseScale, adam_preconditioner
from entropy_experiments.online.rows import PREFIX
from entropy_experiments.online.trl import EntropyProbeCallback
from entropy_experiments.online.trl_noise import NOISE_ROWS, shared_share
from entropy_experiments.online.trl_trainer import unwrapped_optimizer
from oracles.tiny_grpo import assert_same_outcome, grpo, outcome

pytestmark = pytest.mark.contract

STEPS = 7
PROMPTS = 2
"""Of a microbatch: 8 responses in groups of 4."""


class Accumulated(TrainerCallback):
    """`.grad` after each backward pass, by copies: another way to the microbatches' gradients."""

    def __init__(self, trainer: Any = None) -> None:
        self.trainer, self.steps = trainer, []
        self._now: list[dict[str, torch.Tensor]] = []
        self._metric: dict[str, torch.Tensor] | None = None

    def _keep(self) -> None:
        model = self.trainer.model
        self._now.append(
            {n: p.grad.double().clone() for n, p in model.named_parameters() if p.requires_grad}
        )

    def on_step_begin(self, args, state, control, **_):
        params = {n: p for n, p in self.trainer.model.named_parameters() if p.requires_grad}
        found = adam_preconditioner(unwrapped_optimizer(self.trainer.optimizer), params)
        self._metric = None if found is None else {n: found[n].double().clone() for n in params}

    def on_substep_end(self, args, state, control, **_):
        self._keep()

    def on_pre_optimizer_step(self, args, state, control, **_):
        self._keep()
        before = [{n: torch.zeros_like(g) for n, g in self._now[0].items()}, *self._now]
        parts = [
            {n: after[n] - earlier[n] for n in after}
            for earlier, after in zip(before, self._now, strict=False)
        ]
        self.steps.append((parts, self._metric))
        self._now = []


def _trained(folder: Path, *callbacks: Any, **changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        settings: dict[str, Any] = {"max_steps": STEPS} | changes
        trainer = grpo(folder, callbacks=list(callbacks), **settings)
        for callback in callbacks:
            if isinstance(callback, Accumulated):
                callback.trainer = trainer
        trainer.train()
        trainer.kept = outcome(trainer)
    return trainer


def _probe(**options: Any) -> EntropyProbeCallback:
    usual = {"max_overhead": None, "every": 100, "prompts": 5, "noise_scale": True}
    return EntropyProbeCallback(**(usual | options))


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / NOISE_ROWS).read_text().splitlines()]


def test_it_is_the_core_on_the_same_gradients(tmp_path):
    callback, watch = _probe(), Accumulated()
    # Without clipping `.grad` is what accumulated, to the last.
    trainer = _trained(tmp_path, callback, watch, max_grad_norm=0.0)
    assert callback.off is None
    rows = _rows(tmp_path)
    assert [row["step"] for row in rows] == list(range(STEPS))
    core = NoiseScale(watch.steps[0][0][0])
    for (parts, metric), row in zip(watch.steps, rows, strict=True):
        core.open_step(metric)
        for part in parts:
            core.add({n: len(parts) * g for n, g in part.items()}, weight=PROMPTS)
        core.close_step(distributed=False)
        for name in ("raw", "adam") if core.adam_steps else ("raw",):
            expected, found = core.estimate(name).as_dict(), row[name]
            size = abs(expected["noise"]["value"]) / (2 * PROMPTS)  # what signal is a difference of
            for part in ("signal", "noise"):
                assert found[part]["value"] == pytest.approx(
                    expected[part]["value"], abs=1e-5 * size
                )
            assert found["samples"] == expected["samples"] == 2 * PROMPTS
            assert (found["critical_batch"] is None) == (expected["critical_batch"] is None)
    assert rows[0]["adam"] is None  # the first step has no moments
    assert rows[1]["adam"] is not None
    logged = [row for row in trainer.state.log_history if "loss" in row][-1]
    names = {"noise_scale_low", "gradient_signal", "gradient_noise", "gradient_signal_adam"}
    names |= {"gradient_noise_adam", "batch_prompts", "noise_scale_shared_pairs"}
    assert names <= {name.removeprefix(PREFIX) for name in logged if name.startswith(PREFIX)}
    assert all(math.isfinite(v) for n, v in logged.items() if n.startswith(PREFIX))
    assert logged[PREFIX + "gradient_noise"] == pytest.approx(rows[-1]["raw"]["noise"]["value"])


def test_clipping_does_not_reach_it(tmp_path):
    """At a norm of 0.05 every step is clipped, and the first two rows are the same without."""
    for name, norm in (("clipped", 0.05), ("not", 0.0)):
        _trained(tmp_path / name, _probe(), max_steps=1, max_grad_norm=norm)
    clipped, not_clipped = (_rows(tmp_path / name)[0]["raw"] for name in ("clipped", "not"))
    assert clipped["noise"]["value"] == not_clipped["noise"]["value"] > 0.05


@pytest.mark.parametrize("kind", ["lora", pytest.param("reentrant", marks=pytest.mark.slow)])
def test_training_is_bit_identical(kind, tmp_path):
    changes: dict[str, Any] = {"max_steps": 4}
    if kind == "reentrant":
        changes |= {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        }
    callback = _probe()
    with_noise = _trained(tmp_path / "on", callback, **changes)
    assert callback.off is None
    assert len(_rows(tmp_path / "on")) == 4
    assert_same_outcome(with_noise.kept, _trained(tmp_path / "off", **changes).kept)
    hooks = [p._backward_hooks for p in with_noise.model.parameters() if p.requires_grad]
    assert not any(hooks)  # nothing stays behind


def test_one_pass_on_one_rank_is_said_once(tmp_path, caplog):
    callback = _probe(every=1)
    trainer = _trained(tmp_path, callback, max_steps=3, gradient_accumulation_steps=1)
    assert trainer.state.global_step == 3
    assert callback.off is None
    assert len(callback.rows) == 3  # the rest of the probe goes on
    said = [r.getMessage() for r in caplog.records if "noise_scale" in r.getMessage()]
    assert len(said) == 1
    assert "no second gradient" in said[0]
    assert not (tmp_path / NOISE_ROWS).exists()


def test_prompts_in_several_microbatches_are_told(tmp_path, caplog):
    _trained(tmp_path, _probe(), max_steps=3)
    rows = _rows(tmp_path)
    assert 0 < rows[-1]["shared_pairs"] < 1
    said = [r for r in caplog.records if "have the same prompt" in r.getMessage()]
    assert len(said) == 1


def test_shared_share():
    assert shared_share([Counter(a=4), Counter(b=4)]) == 0
    assert shared_share([Counter(a=2, b=2), Counter(a=2, b=2)]) == 0.5
    assert shared_share([Counter(a=1), Counter(a=1), Counter(b=1)]) == pytest.approx(1 / 3)


def test_a_failure_inside_backward_does_not_reach_training(tmp_path, monkeypatch, caplog):
    error = RuntimeError("out of memory in a hook")

    def broken(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(NoiseScale, "add_piece", broken)
    callback = _probe()
    trainer = _trained(tmp_path / "on", callback, max_steps=3)
    assert callback.off is error
    said = [r for r in caplog.records if "entropy probe failed" in r.getMessage()]
    assert len(said) == 1
    assert_same_outcome(trainer.kept, _trained(tmp_path / "off", max_steps=3).kept)


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="noise_window is 2; expected at least 5"):
        EntropyProbeCallback(noise_scale=True, noise_window=2)
    callback = _probe()
    trainer = grpo(tmp_path, callbacks=[callback])
    trainer.args.fp16 = True
    with pytest.raises(ValueError, match="noise_scale with fp16: gradients pass multiplied"):
        callback.attach(trainer).on_train_begin(trainer.args, trainer.state, trainer.control)
