"""The probe inside a real GRPOTrainer: it sees everything and disturbs nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from entropy_experiments.online import trl_trainer
from entropy_experiments.online.rows import ALIASES, PREFIX, read_rows
from entropy_experiments.online.trl import EntropyProbeCallback
from entropy_experiments.online.trl_options import LAST_ENTROPY
from entropy_experiments.online.trl_trainer import (
    GENERATE_METHOD,
    IN_TRAINING,
    MASKS,
    PRIVATES,
    REWARD_METHOD,
)
from entropy_experiments.results import ROWS_FILE
from oracles.tiny_grpo import assert_same_outcome, grpo, outcome

pytestmark = pytest.mark.contract

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"lora": False, "learning_rate": 1e-3},
    "checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    # Its first batch bends more than the others': the line is asked for at a fifth of the rate.
    "iterations": {"num_iterations": 2, "steps_per_generation": 4, "learning_rate": 1e-3},
}


def _trained(folder: Path, *callbacks: Any, **changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        trainer = grpo(folder, callbacks=list(callbacks), **changes)
        trainer.train()
        trainer.kept = outcome(trainer)
    return trainer


def _probe(**options: Any) -> EntropyProbeCallback:
    return EntropyProbeCallback(**({"max_overhead": None, "prompts": 6} | options))


SOON = ("lora", "checkpointing")
"""The others take as long and differ in less: they are of the slow tier."""


@pytest.mark.parametrize(
    "kind", [k if k in SOON else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_training_is_bit_identical_with_and_without(kind, tmp_path):
    callback = _probe()
    with_probe = _trained(tmp_path / "on", callback, **KINDS[kind])
    without = _trained(tmp_path / "off", **KINDS[kind])
    assert callback.off is None
    assert len(callback.rows) == 6
    assert_same_outcome(with_probe.kept, without.kept)
    top = torch.log(torch.tensor(float(len(with_probe.processing_class))))
    for row in callback.rows:
        assert 0 < row["entropy"] < top
        assert row["step_mismatch"] < 1e-3  # the step that was predicted is the step that was made
        assert row["skipped"] == 0
        # The same rollouts, and a small step: what the line misses is a fraction of what it says.
        assert abs(row["bend"]) < 0.5 * abs(row["predicted"]) + 1e-4


def _tracker() -> Any:
    """Stands for what `report_to` adds: a callback that is handed each row of metrics."""
    from transformers import TrainerCallback

    class Tracker(TrainerCallback):
        def __init__(self) -> None:
            self.seen: dict[int, dict[str, float]] = {}

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in logs:  # not the summary at the end
                self.seen[state.global_step - 1] = dict(logs)

    return Tracker()


def test_its_numbers_reach_the_trackers_the_history_and_a_file(tmp_path):
    callback, tracker = _probe(every=2), _tracker()
    trainer = _trained(tmp_path, callback, tracker)
    rows = read_rows(tmp_path / ROWS_FILE)
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert rows == callback.rows
    logged = {row["step"] - 1: row for row in trainer.state.log_history if "loss" in row}
    assert list(tracker.seen) == list(range(6))
    for told in (logged, tracker.seen):
        for row in rows:
            seen = told[row["step"]]
            assert seen[PREFIX + "step"] == row["step"]  # as files and reports count it
            for name in ("predicted", "measured", "measured_low", "direct", "state", "overhead"):
                assert seen[PREFIX + name] == pytest.approx(row[name], rel=1e-3)
            for alias, name in ALIASES.items():
                assert seen[alias] == pytest.approx(row[name], rel=1e-3)
        assert not any(name.startswith(PREFIX) for name in told[1])
    for line in (tmp_path / ROWS_FILE).read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))


def test_attach_adds_it_once(tmp_path):
    callback = _probe(every=3)
    with torch.random.fork_rng(devices=[]):
        trainer = grpo(tmp_path, callbacks=[callback], max_steps=1)
        assert callback.attach(trainer) is callback
        own = [c for c in trainer.callback_handler.callbacks if c is callback]
        assert len(own) == 1
        trainer.train()
    assert len(callback.rows) == 1


def test_the_half_that_a_step_does_not_learn_from(tmp_path):
    callback = _probe(evaluation="half")
    _trained(tmp_path, callback, max_steps=2, steps_per_generation=4)
    assert callback.off is None
    assert [row["rollouts"] for row in callback.rows] == [16, 16]


def test_no_such_half_is_said_once_and_training_goes_on(tmp_path, caplog):
    callback = _probe(evaluation="half")
    trainer = _trained(tmp_path, callback, max_steps=3)
    assert trainer.state.global_step == 3
    assert "evaluation='half' needs rollouts" in str(callback.off)
    assert sum("The entropy probe failed" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("name", PRIVATES)
def test_trl_has_the_privates_relied_upon(name, tmp_path):
    trainer = grpo(tmp_path, callbacks=[])
    assert hasattr(trainer, name)


@pytest.mark.parametrize("name", [GENERATE_METHOD, REWARD_METHOD, *MASKS, LAST_ENTROPY])
def test_trl_has_the_methods_whose_results_are_captured(name, tmp_path):
    """Without one of these nothing fails: rewards or masks would be missing from the record."""
    assert hasattr(grpo(tmp_path, callbacks=[]), name)


def test_every_private_that_is_read_is_in_the_list():
    modules = Path(trl_trainer.__file__).parent.glob("*.py")
    read = {name for m in modules for name in re.findall(r"trainer\.(_\w+)", m.read_text())}
    assert read == {name for name in PRIVATES if name.startswith("_")}


def test_the_hooks_come_when_they_are_said_to(tmp_path):
    """Before: gradients and old weights. After: gradients still there, new weights, same rate."""
    from transformers import TrainerCallback

    seen: list[tuple[Any, ...]] = []
    passes: list[int] = []

    class Look(TrainerCallback):
        trainer: Any = None

        def on_step_begin(self, args, state, control, **_):
            passes.append(*(getattr(self.trainer, name) for name in IN_TRAINING))

        def _now(self) -> tuple[Any, ...]:
            model = self.trainer.model
            grads = [p.grad for p in model.parameters() if p.requires_grad]
            weights = [p.detach().clone() for p in model.parameters() if p.requires_grad]
            norm = float(sum((g**2).sum() for g in grads)) ** 0.5
            return norm, weights, self.trainer.optimizer.param_groups[0]["lr"]

        def on_pre_optimizer_step(self, args, state, control, **_):
            seen.append(("before", *self._now()))

        def on_optimizer_step(self, args, state, control, **_):
            seen.append(("after", *self._now()))

    look = Look()
    with torch.random.fork_rng(devices=[]):
        trainer = grpo(tmp_path, callbacks=[look], max_steps=3)
        look.trainer = trainer
        trainer.train()
    assert passes == [trainer.args.gradient_accumulation_steps] * 3
    for before, after in zip(seen[::2], seen[1::2], strict=True):
        assert (before[0], after[0]) == ("before", "after")
        assert before[1] <= 0.05 * (1 + 1e-5)  # clipped
        assert before[1] == after[1]
        assert before[3] == after[3]  # the rate in use
        assert any(not torch.equal(a, b) for a, b in zip(before[2], after[2], strict=True))
    assert any(before[1] > 0 for before in seen)


def test_the_training_batch_judges_itself_across_prompts(tmp_path):
    callback = _probe(evaluation="batch")
    _trained(tmp_path, callback, max_steps=3)
    assert callback.off is None
    assert [row["rollouts"] for row in callback.rows] == [16] * 3
