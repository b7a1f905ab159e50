"""A recorded run, replayed from its files alone: the online numbers, and the step itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.trainer_utils import SaveStrategy

from entropy_experiments import compute_update_vector_adamw, first_order, step_certificate
from entropy_experiments.artifacts import sha256
from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.config import Config
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.online.trl import EntropyProbeCallback
from entropy_experiments.pipelines.training_facts import training_facts
from entropy_experiments.sampling.rollout_files import (
    load_rollouts,
    load_update_batch,
    recorded_meta,
)
from oracles.tiny_grpo import grpo
from oracles.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.contract

STEPS = 6


@pytest.fixture(scope="module", params=["dapo", pytest.param("dr_grpo", marks=pytest.mark.slow)])
def run(request, tmp_path_factory) -> tuple[Path, EntropyProbeCallback]:
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model().save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    callback = EntropyProbeCallback(
        max_overhead=None, prompts=6, record=folder / "record", microbatch=4
    )
    with torch.random.fork_rng(devices=[]):
        trainer = grpo(
            folder / "run",
            callbacks=[callback],
            loss_type=request.param,
            max_steps=STEPS,
            save_strategy="steps",
            save_steps=1,
        )
        trainer.train()
    assert callback.off is None
    return folder, callback


def _replayed(folder: Path, step: int) -> tuple[Any, Any, Any]:
    """(online-like prediction, certificate, facts) of a step, from what is on disk."""
    place = folder / "run" / f"checkpoint-{step}"
    before = load_checkpoint(place, base=folder / "base")
    after = load_checkpoint(folder / "run" / f"checkpoint-{step + 1}", base=folder / "base")
    facts = training_facts(Config(), before.facts, before.fact_sources)
    assert before.recorded == place / "update_batch"
    batch, meta = load_update_batch(place / "update_batch")
    assert meta["weights"] in before.hashes.values()
    assert before.optimizer is not None
    policy = SequenceProcessor(before.model, temperature=facts["temperature"])
    direction, _, _ = compute_update_vector_adamw(
        policy, batch, facts.objective, before.optimizer, max_grad_norm=facts["max_grad_norm"]
    )
    evaluation, _ = load_rollouts(place / "evaluation")
    slope = first_order(
        policy, evaluation, direction, horizon=facts["max_completion_length"], repackings=0
    )
    certificate = step_certificate(direction, policy.params, SequenceProcessor(after.model).params)
    return direction.lr * slope, certificate, facts


@pytest.mark.parametrize("step", range(3, STEPS))
def test_a_recorded_step_replays_to_the_online_prediction(run, step):
    """Not from the first steps: LoRA's B is nearly zero there, and Adam scales rounding up."""
    folder, callback = run
    predicted, certificate, facts = _replayed(folder, step)
    row = next(row for row in callback.rows if row["step"] == step)
    # A change may cancel to nearly nothing; its error bar tells what it was made of.
    low, high = row["predicted_low"], row["predicted_high"]
    size = max(abs(row["predicted"]), (high - low) / 2)
    assert abs(predicted.value - row["predicted"]) <= 1e-5 * size
    assert predicted.interval == pytest.approx((low, high), abs=1e-5 * size)
    assert certificate.passed
    assert not {"loss", "clip_low", "max_grad_norm", "temperature"} & set(facts.assumed)


def test_every_step_is_kept_checkpoint_or_not(run):
    folder, _ = run
    for step in range(STEPS):
        assert recorded_meta(folder / "record" / f"step_{step}" / "update_batch")["step"] == step
        batch, _ = load_update_batch(folder / "record" / f"step_{step}" / "update_batch")
        assert len(batch.rollouts) == 16
        assert load_rollouts(folder / "record" / f"step_{step}" / "evaluation")[0] is not None
    assert (folder / "record" / "entropy_probe.json").is_file()


def _recorded(folder: Path, *, steps: int, resume: Any = None) -> None:
    callback = EntropyProbeCallback(max_overhead=None, prompts=6, record=folder / "record")
    with torch.random.fork_rng(devices=[]):
        trainer = grpo(
            folder / "run",
            callbacks=[callback],
            max_steps=steps,
            save_strategy="steps",
            save_steps=1,
            lr_scheduler_type="constant",
        )
        trainer.train(resume_from_checkpoint=resume)
    assert callback.off is None


@pytest.mark.parametrize("by_name", [True, False], ids=["a folder", "the last one"])
def test_the_step_after_a_resume_is_beside_the_checkpoint_it_was_made_from(tmp_path, by_name):
    _recorded(tmp_path, steps=2)
    last = tmp_path / "run" / "checkpoint-2"
    assert not (last / "update_batch").exists()
    _recorded(tmp_path, steps=3, resume=str(last) if by_name else True)
    batch, meta = load_update_batch(last / "update_batch")
    assert meta["step"] == 2
    assert meta["weights"] == sha256(last / "adapter_model.safetensors")
    step, _ = load_update_batch(tmp_path / "record" / "step_2" / "update_batch")
    assert torch.equal(batch.rollouts.tokens_NS, step.rollouts.tokens_NS)
    assert load_rollouts(last / "evaluation")[1]["weights"] == meta["weights"]
    assert not (tmp_path / "run" / "checkpoint-3" / "update_batch").exists()


def test_a_checkpoint_of_another_run_is_left_as_it_is(tmp_path):
    _recorded(tmp_path / "one", steps=1)
    given = tmp_path / "one" / "run" / "checkpoint-1"
    before = sorted(path.name for path in given.iterdir())
    _recorded(tmp_path / "two", steps=2, resume=str(given))
    assert (tmp_path / "two" / "record" / "step_1" / "update_batch").is_dir()
    assert sorted(path.name for path in given.iterdir()) == before


def test_another_step_s_batch_does_not_replay(run):
    """The certificate has teeth: the batch of the step before gives another step."""
    folder, _ = run
    place = folder / "run" / "checkpoint-3"
    before = load_checkpoint(place, base=folder / "base")
    after = load_checkpoint(folder / "run" / "checkpoint-4", base=folder / "base")
    facts = training_facts(Config(), before.facts, before.fact_sources)
    other, _ = load_update_batch(folder / "record" / "step_2" / "update_batch")
    policy = SequenceProcessor(before.model)
    assert before.optimizer is not None
    direction, _, _ = compute_update_vector_adamw(
        policy,
        replace(other, old_logprob_NS=None),
        facts.objective,
        before.optimizer,
        max_grad_norm=facts["max_grad_norm"],
    )
    found = step_certificate(direction, policy.params, SequenceProcessor(after.model).params)
    assert not found.passed


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_second_trainer_trains_without_the_probe(tmp_path, caplog):
    """It would write its batches beside the first one's checkpoints, and over its record."""
    callback = EntropyProbeCallback(max_overhead=None, prompts=6, record=tmp_path / "record")
    settings = {"save_strategy": "steps", "save_steps": 1}
    with torch.random.fork_rng(devices=[]):
        grpo(tmp_path / "one", callbacks=[callback], max_steps=1, **settings).train()
        rows, before = list(callback.rows), _files(tmp_path)
        second = grpo(tmp_path / "two", callbacks=[callback], max_steps=2)
        second.train()
    assert second.state.global_step == 2
    assert isinstance(callback.off, ValueError)
    assert "has served another trainer" in caplog.text
    assert callback.rows == rows
    after = _files(tmp_path)
    assert {name: after[name] for name in before} == before


def test_a_second_training_of_one_trainer_leaves_the_first_one_s_checkpoint(tmp_path):
    callback = EntropyProbeCallback(max_overhead=None, prompts=6, record=tmp_path / "record")
    with torch.random.fork_rng(devices=[]):
        trainer = grpo(tmp_path / "run", callbacks=[callback], max_steps=1, save_strategy="steps")
        trainer.args.save_steps = 1
        trainer.train()
        last = tmp_path / "run" / "checkpoint-1"
        before = _files(last)
        trainer.args.save_strategy, trainer.args.max_steps = SaveStrategy.NO, 2
        trainer.train()
    assert callback.off is None
    assert _files(last) == before
