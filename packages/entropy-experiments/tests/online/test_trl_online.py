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
from entropy_experiments.online.trl_versions import (
    GENERATE_METHOD,
    IN_TRAINING,
    REWARD_METHOD,
    VERSIONS,
    eos_of,
    names_of,
    prompt_ids,
    tokenizer_of,
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


@pytest.mark.parametrize("name", names_of().read)
def test_trl_has_the_names_relied_upon(name, tmp_path):
    trainer = grpo(tmp_path, callbacks=[])
    assert hasattr(trainer, name)


CAPTURED = (GENERATE_METHOD, REWARD_METHOD, *names_of().masks, names_of().last_entropy)


@pytest.mark.parametrize("name", [name for name in CAPTURED if name])
def test_trl_has_the_methods_whose_results_are_captured(name, tmp_path):
    """Without one of these nothing fails: rewards or masks would be missing from the record."""
    assert hasattr(grpo(tmp_path, callbacks=[]), name)


def test_every_private_that_is_read_is_in_the_table():
    modules = Path(trl_trainer.__file__).parent.glob("*.py")
    read = {name for m in modules for name in re.findall(r"trainer\.(_\w+)", m.read_text())}
    known = {name for row in VERSIONS for name in row.read if name.startswith("_")}
    assert read == known - {row.tokenizer for row in VERSIONS}  # read by `tokenizer_of`


def test_the_tokens_are_those_that_training_uses(tmp_path):
    trainer = _trained(tmp_path, max_steps=1)
    used = {
        tuple(ids[mask.bool()].tolist())
        for part in trainer._buffered_inputs
        for ids, mask in zip(part["prompt_ids"], part["prompt_mask"], strict=True)
    }
    ours = {prompt_ids(trainer, row["prompt"]) for row in trainer.train_dataset}
    assert used <= ours
    tokenizer = tokenizer_of(trainer)
    assert tokenizer.eos_token_id in eos_of(trainer)
    assert tokenizer.pad_token_id is not None


@pytest.mark.parametrize(
    ("trl", "since"),
    [
        ("0.24.0", "0.24.0"),
        ("0.24.1.dev0", "0.24.0"),
        ("0.26.2", "0.26.0"),
        ("0.29.0", "0.27.0"),
        ("0.29.1", "0.29.1"),
        ("1.2.0", "0.29.1"),
        ("1.9.2", "1.8.0"),
        ("1.14.1", "1.8.0"),
        ("1.16.0", "1.14.2"),
        ("2.0.0rc1", "1.14.2"),
    ],
)
def test_the_row_of_a_version(trl, since):
    assert names_of(trl).since == since


def test_an_older_trl_is_refused():
    with pytest.raises(ValueError, match=r"trl 0\.23\.1 is installed; expected 0\.24\.0 or newer"):
        names_of("0.23.1")


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
