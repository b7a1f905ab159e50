"""The learning rate that training recorded with its step, beside a checkpoint with another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from entropy_experiments.config import parse_config
from entropy_experiments.findings import Findings
from entropy_experiments.online.step_recorder import StepRecorder
from entropy_experiments.pipelines.influence.certified import certificate_of
from entropy_experiments.pipelines.probe_inputs import ProbeInputs, gather
from entropy_experiments.update.certificate import FingerprintCertificate
from oracles.own_loop import FACTS, LR, PROMPTS, Loop

SAVED = 2


@pytest.fixture(scope="module", params=[0.9, 0.97], ids=["tenth", "hair"])
def checkpoint(request, tmp_path_factory) -> tuple[Path, float]:
    """A loop whose schedule moves on after the checkpoint was saved, and before the next step."""
    rate = LR * request.param
    return recorded_at(tmp_path_factory.mktemp("schedule"), rate), rate


def recorded_at(folder: Path, rate: float) -> Path:
    """A checkpoint that holds LR, with the record of a step at another rate."""
    torch.manual_seed(0)
    loop = Loop.begin()
    rows = [{"prompt": prompt, "number": i} for i, prompt in enumerate(PROMPTS)]
    recorder = StepRecorder(
        folder / "record", loop.model, loop.optimizer, facts=FACTS, prompts=rows,
        tokenizer=loop.tokenizer,
    )  # fmt: skip
    saved = folder / f"step_{SAVED}"

    @contextmanager
    def step(batch: dict[str, Any]) -> Iterator[None]:
        if recorder.steps == SAVED:
            for group in loop.optimizer.param_groups:
                group["lr"] = rate
        with recorder.step(**batch):
            yield

    def after(made: int) -> None:
        if made == SAVED:
            loop.save(saved)
            recorder.saved(saved)

    loop.run(SAVED + 2, step=step, after=after)
    assert recorder.off is None
    return saved


def probe_of(folder: Path, **update: Any) -> ProbeInputs:
    document = {
        "checkpoint": {"dtype": "float64"},
        "data": {"evaluation_prompts": 3},
        "sampling": {"save": str(folder.parent / "rollouts")},
    }
    return gather(parse_config({**document, "update": update}), folder)


@pytest.mark.naive
def test_the_step_is_made_at_the_recorded_rate(checkpoint):
    folder, rate = checkpoint
    probe = probe_of(folder)
    assert probe.checkpoint.lr == LR
    assert probe.lr == probe.lr_stored == pytest.approx(rate, rel=1e-12)
    (note,) = (note for note in probe.notes if note.startswith("training made its step at learn"))
    assert f"{rate:.6g}, as recorded" in note
    assert f"holds {LR:.6g}" in note
    certificate, _ = certificate_of(probe, probe.step()[0])
    assert isinstance(certificate, FingerprintCertificate)
    assert certificate.relative_error < 1e-6


@pytest.mark.naive
def test_a_rate_in_the_config_is_used_and_the_certificate_is_at_training_s(checkpoint):
    folder, rate = checkpoint
    probe = probe_of(folder, lr=1e-3)
    assert (probe.lr, probe.lr_stored) == (1e-3, pytest.approx(rate, rel=1e-12))
    assert not any("as recorded, which is used" in note for note in probe.notes)
    certificate, _ = certificate_of(probe, probe.step()[0])
    assert certificate is not None
    assert certificate.relative_error < 1e-6


@pytest.fixture(scope="module")
def unmoved(tmp_path_factory) -> Path:
    """A checkpoint whose optimizer holds LR, and from which training made a step at rate 0."""
    return recorded_at(tmp_path_factory.mktemp("unmoved"), 0.0)


@pytest.mark.faults
def test_a_recorded_rate_of_zero_is_followed(unmoved):
    """`explain` follows it; `run` analysed a step at the checkpoint's rate, which nobody made."""
    words = rf"at learning rate 0, as recorded .* holds {LR:.6g}\. Expected a step that moved"
    with pytest.raises(ValueError, match=words):
        probe_of(unmoved)
    probe = probe_of(unmoved, lr=1e-3)
    assert probe.lr == 1e-3
    certificate, absent = certificate_of(probe, probe.step()[0])
    assert certificate is None
    assert absent == "training made its step at learning rate 0, as recorded: nothing moved"


@pytest.mark.parametrize(
    ("distance", "words"),
    [
        (1e-5, "the step analysed here is the step that was made: 1e-05 of its size away"),
        (0.03, "the step analysed here is not quite the step that was made: 0.03 of its size"),
        (0.2, "the step rebuilt here is not the step that training made: it is 20% away"),
    ],
)
def test_a_fingerprint_s_words(distance, words):
    certificate = FingerprintCertificate(relative_error=distance, cosine=1.0)
    assert str(certificate).startswith(words)


@pytest.mark.parametrize(("stored", "real", "changed"), [(0.0, True, True), (0.0, False, False)])
def test_another_rate_than_a_recorded_zero_is_told(stored, real, changed):
    """The headline said that training made the step at the rate that was asked about."""
    findings = SimpleNamespace(lr=1e-3, lr_stored=stored, real=real)
    assert Findings.lr_changed.fget(findings) is changed
