"""A step that is not the one that training made: said first, and not trusted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from entropy_experiments.checkpoints.recorded_step import MADE_STEP, read_recorded_step
from entropy_experiments.online.trl import EntropyProbeCallback
from entropy_experiments.report.words import made_by_training
from entropy_experiments.results import ProbeResult
from online.test_trl_matrix import probed, trained
from oracles.tiny_grpo import grpo
from oracles.tiny_models import tiny_model, tiny_tokenizer
from oracles.trl_matrix import CASES, STEP, STEPS

pytestmark = pytest.mark.contract

SUBCLASS = next(case for case in CASES if case.name == "subclass")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A trainer with a loss of its own."""
    folder = tmp_path_factory.mktemp("subclass")
    callback = trained(folder, SUBCLASS)
    assert callback.off is None
    return folder


def _copy(run: Path, folder: Path, *, gradient: bool = True, fingerprint: bool = True) -> Path:
    shutil.copytree(run, folder, dirs_exist_ok=True)
    made = folder / "run" / f"checkpoint-{STEP}" / MADE_STEP
    if not gradient:
        (made / "gradient.safetensors").unlink()
    if not fingerprint:
        shutil.rmtree(made)
    return folder


def _reasons(found: dict[str, Any]) -> list[list[str]]:
    return [found["estimates"][name]["why_not"] for name in ("deltaH1", "deltaH_true", "momentum")]


def test_without_its_gradient_another_loss_is_not_trusted(run, tmp_path):
    found, split = probed(_copy(run, tmp_path, gradient=False))
    first = found["verdict"][0]
    assert first.startswith("This is not the step that training made: after step_3")
    assert "not followed here: OwnLoss has a _compute_loss of its own" in first
    assert found["step_certificate"]["apart"]
    for why in _reasons(found):
        assert any("this is not the step that training made" in reason for reason in why)
    assert "The prediction is NOT trusted: this is not the step" in "\n".join(found["verdict"])
    assert "is not the step that training made" in split


def test_at_another_rate_it_is_checked_at_the_stored_one(run, tmp_path):
    """A longer step along the same direction is no nearer to training's."""
    stored = probed(_copy(run, tmp_path, gradient=False))[0]["step_certificate"]["relative_error"]
    found, split = probed(tmp_path, update={"lr": 0.006})
    assert found["learning_rate"] == 0.006
    assert found["step_certificate"]["relative_error"] == pytest.approx(stored, rel=1e-6)
    assert found["verdict"][0].startswith("This is not the step that training made: after step_3")
    for why in _reasons(found):
        assert any("this is not the step that training made" in reason for reason in why)
    assert "is not the step that training made" in split


def test_beside_half_a_checkpoint_the_fingerprint_is_what_it_is_checked_by(run, tmp_path):
    folder = _copy(run, tmp_path, gradient=False)
    after = folder / "run" / f"checkpoint-{STEP + 1}"
    shutil.copytree(folder / "run" / f"checkpoint-{STEP}", after)
    (after / "trainer_state.json").unlink()  # written last
    found, split = probed(folder)
    assert found["step_certificate"]["apart"]
    assert not any(found["estimates"][name]["trusted"] for name in ("deltaH1", "deltaH_true"))
    assert "is not the step that training made" in split


def test_another_gradient_alone_is_reason_enough(run, tmp_path):
    """Training ended before the step was made: of it the gradient's fingerprint is all there is."""
    folder = _copy(run, tmp_path, gradient=False)
    file = folder / "run" / f"checkpoint-{STEP}" / MADE_STEP / "fingerprint.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "change": None}))
    found, split = probed(folder)
    assert "step_certificate" not in found
    away = f"{found['made_step']['gradient_distance']:.0%}"
    first = found["verdict"][0]
    assert first.startswith("This is not the step that training made: after step_3, the gradient")
    assert f"is {away} away from training's" in first
    for why in _reasons(found):
        assert any(f"the batch is {away} away from the recorded one" in reason for reason in why)
    assert split.startswith("The gradient rebuilt from the recorded batch is not the one")


def test_with_its_gradient_the_whole_step_is_right(run, tmp_path):
    found, split = probed(_copy(run, tmp_path))
    assert found["verdict"][0].startswith("The update that training made after step_3")
    assert "so there is no split by rollout or token" in found["verdict"][1]
    assert found["step_certificate"]["passed"]
    assert not any("not the step" in reason for why in _reasons(found) for reason in why)
    assert "entropy-probe run` analyses the whole step" in split


def test_with_nothing_to_check_it_by_it_is_not_trusted_either(run, tmp_path):
    found, _ = probed(_copy(run, tmp_path, fingerprint=False))
    assert "(not checked against the step that training made)" in found["verdict"][0]
    assert "step_certificate" not in found
    for why in _reasons(found):
        assert any("nothing was recorded to check the step by" in reason for reason in why)


def test_a_gradient_that_was_changed_is_refused(run, tmp_path):
    folder = _copy(run, tmp_path)
    place = folder / "run" / f"checkpoint-{STEP}" / MADE_STEP
    file = place / "gradient.safetensors"
    gradient = load_file(file)
    name = next(iter(gradient))
    gradient[name].view(-1)[0] += 0.1 * max(float(g.norm()) for g in gradient.values())
    save_file(gradient, file)
    with pytest.raises(ValueError, match=r"not the gradient that was recorded: its sha256 differs"):
        probed(folder)
    # Records of the version before have no sha256: the fingerprint itself is what is left.
    fingerprint = json.loads((place / "fingerprint.json").read_text())
    del fingerprint["gradient_sha256"]
    (place / "fingerprint.json").write_text(json.dumps(fingerprint))
    with pytest.raises(ValueError, match=r"is not the gradient that was recorded: it is .* away"):
        probed(folder)
    del gradient[name]
    save_file(gradient, file)
    with pytest.raises(ValueError, match="does not hold the gradient of this policy"):
        probed(folder)


def test_every_step_has_its_fingerprint_and_they_fit_together(run):
    """Sketches are linear: the changes of all steps from a checkpoint to the next add up."""
    steps = [
        read_recorded_step(run / "run" / "record" / f"step_{i}" / MADE_STEP) for i in range(STEPS)
    ]
    made = [step for step in steps if step is not None]
    assert [step.step for step in made] == list(range(STEPS))
    assert all(step.change is not None and bool(step.change.any()) for step in made)
    from entropy_experiments.checkpoints.load import load_checkpoint
    from entropy_experiments.models.scoring import SequenceProcessor
    from entropy_experiments.numerics.sketch import sketch

    before, after = (
        sketch(SequenceProcessor(load_checkpoint(path, base=run / "base").model).params)
        for path in (run / "run" / f"checkpoint-{i}" for i in (STEP, STEPS))
    )
    total = sum((step.change for step in made[STEP:] if step.change is not None), torch.zeros(64))
    assert float((after - before - total).norm() / total.norm()) < 1e-6


def test_a_study_that_is_refused_does_not_claim_its_folder(run, tmp_path):
    from entropy_experiments import EntropyInfluenceRunner

    out = tmp_path / "study"
    config = {
        "checkpoint": {"base": str(run / "base")},
        "batch_config": {"evaluation": "recorded"},
        "detailed_logging": {"output_directory": str(tmp_path / "logs")},
        "influence": {"run_directory": str(out)},
    }
    with pytest.raises(ValueError, match="is not the step that training made"):
        EntropyInfluenceRunner(config, quiet=True).run(
            checkpoint_path=run / "run" / f"checkpoint-{STEP}"
        )
    assert not out.exists() or not (out / "identity.json").exists()
    assert not out.exists() or not any(out.iterdir())


class _Shrink(TrainerCallback):
    """Changes the weights when the trainer calls `event`, as an average of weights does."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._shrink)

    def _shrink(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        with torch.no_grad():
            for value in model.parameters():
                value.mul_(0.9995)


def _changed_weights(folder: Path, event: str, **changes: Any) -> list[Any]:
    tiny_model().save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    callback = EntropyProbeCallback(
        max_overhead=None, prompts=6, microbatch=4, record=folder / "run" / "record"
    )
    settings = {"max_steps": STEP + 1, "save_strategy": "steps", "lr_scheduler_type": "constant"}
    with torch.random.fork_rng(devices=[]):
        callbacks = [_Shrink(event), callback]
        grpo(folder / "run", callbacks=callbacks, lora=False, **(settings | changes)).train()
    assert callback.off is None
    return callback.rows


@pytest.mark.parametrize("save_steps", [STEP, 1], ids=["fingerprint", "next checkpoint"])
def test_a_change_after_a_step_is_not_charged_to_the_next_one(tmp_path, save_steps):
    """It is in the checkpoint from which the next step is made, and in no step."""
    rows = _changed_weights(tmp_path, "on_step_end", save_steps=save_steps)
    found, split = probed(tmp_path)
    assert found["verdict"][0].startswith(f"The update that training made after step_{STEP}")
    assert found["step_certificate"]["relative_error"] < 1e-3
    assert not any("not the step" in reason for why in _reasons(found) for reason in why)
    assert split["step_distance"] < 1e-3
    assert rows[STEP]["step_mismatch"] < 1e-3


def test_a_change_before_a_step_is_what_is_said(tmp_path):
    """The step was made from other weights than those that were saved."""
    _changed_weights(tmp_path, "on_step_begin", save_steps=STEP)
    found, split = probed(tmp_path)
    says = "the weights from which training made its step are 0.0005 of their size away"
    first = found["verdict"][0]
    assert first.startswith(f"This is not the step that training made after step_{STEP}: {says}")
    for why in _reasons(found):
        assert any(says in reason for reason in why)
    assert "step_certificate" not in found
    assert says in split
    assert "not the step that training made" in made_by_training(cast(ProbeResult, found))
