"""SIGTERM while a unit is in work: the unit is stored first. Elsewhere it does what it did."""

from __future__ import annotations

import signal

import pytest
import torch
import typer

from entropy_experiments.cli import job
from entropy_experiments.distributed import ALONE
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.finishing import Terminated, current_unit, finishing_units
from entropy_experiments.sampling.generate import SampleGenerator
from entropy_experiments.sampling.rollout_files import RolloutStore
from oracles.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.faults

PROBLEMS = [Problem(id=str(i), prompt="12345678"[: 1 + i % 7] + "=", answer="") for i in range(12)]


@pytest.fixture
def ended():
    """What SIGTERM did before: here it is noted, and not the end of the tests."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def terminate(*_):
    signal.raise_signal(signal.SIGTERM)


def test_a_unit_in_work_is_finished(ended):
    steps = []

    def unit():
        with current_unit():
            terminate()
            steps.append("drawn")
            terminate()  # a scheduler's, and torchrun's
            steps.append("stored")

    with finishing_units(), pytest.raises(Terminated) as found:
        unit()
    assert steps == ["drawn", "stored"]
    assert found.value.code == 143
    assert ended == []


def test_without_a_unit_in_work_nothing_is_changed(ended):
    with finishing_units():
        terminate()
        with current_unit():
            pass
        terminate()
    with current_unit():  # nobody asked for units to be finished: alone, or in a training
        terminate()
    assert ended == [signal.SIGTERM] * 3


def test_what_goes_wrong_in_a_unit_is_told_and_the_handler_is_taken_back(ended):
    def unit():
        with current_unit():
            terminate()
            raise ValueError("too long")

    with finishing_units(), pytest.raises(ValueError, match="too long"):
        unit()
    terminate()
    assert ended == [signal.SIGTERM]


def sampled(store, progress=None):
    generator = SampleGenerator(
        SequenceProcessor(tiny_model(seed=0)),
        tiny_tokenizer(),
        max_new_tokens=6,
        batch_size=4,
        progress=progress,
        store=store,
    )
    return generator.generate_evaluation_batch(PROBLEMS)


def test_sampling_stores_the_unit_in_work_and_continues_with_the_same_bits(tmp_path, ended):
    store = RolloutStore(tmp_path)

    def in_the_second_unit(told):
        if len(store) == 1 and not told.finished_unit:
            terminate()

    with finishing_units(), pytest.raises(Terminated):
        sampled(store, in_the_second_unit)
    assert len(store) == 2  # of three
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.unit")}
    found, undisturbed = sampled(store), sampled(None)
    assert len(store) == 3
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert torch.equal(found.tokens_NS, undisturbed.tokens_NS)
    bits = [one.behaviour_logprob_NS for one in (found, undisturbed)]
    assert bits[0] is not None
    assert bits[1] is not None
    assert torch.equal(bits[0], bits[1])
    assert ended == []


def test_units_that_are_not_stored_are_not_finished(ended):
    def now(*_):
        raise InterruptedError("at once")

    signal.signal(signal.SIGTERM, now)
    with finishing_units(), pytest.raises(InterruptedError, match="at once"):
        sampled(None, terminate)


def test_the_command_says_so_in_one_line(capsys):
    with pytest.raises(typer.Exit) as found, job._one_error_message(ALONE):
        raise Terminated(143)
    assert found.value.exit_code == 143
    said = capsys.readouterr().err
    assert said.startswith("rank 0: Ended by SIGTERM. Current work is saved; run the same")
    assert said.count("\n") == 1
