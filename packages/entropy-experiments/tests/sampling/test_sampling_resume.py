"""A run that was interrupted and continues from its store equals an undisturbed one, bit by bit."""

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.generate import SampleGenerator
from entropy_experiments.sampling.rewards import Reward
from entropy_experiments.sampling.rollout_files import RolloutStore
from oracles.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.invariant

PROBLEMS = [Problem(id=str(i), prompt="12345678"[: 1 + i % 7] + "=", answer="") for i in range(12)]
PARITY = Reward(
    functions={"parity": lambda texts, _: [float(len(text) % 2) for text in texts]}, weights=(1.0,)
)


def generator(store=None, progress=None, *, seed=0, **options):
    settings = {"max_new_tokens": 12, "batch_size": 4, **options}
    return SampleGenerator(
        SequenceProcessor(tiny_model(seed=seed)),
        tiny_tokenizer(),
        progress=progress,
        store=store,
        **settings,
    )


def interrupt_after(units):
    left = units

    def callback(told):
        nonlocal left
        left -= told.finished_unit
        if left < 0 or (left == 0 and told.finished_unit):
            raise KeyboardInterrupt

    return callback


def assert_same(one, other):
    for name in ("tokens_NS", "attention_NS", "response_NS", "prompt_N", "truncated_N"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(one.behaviour_logprob_NS, other.behaviour_logprob_NS)
    assert one.text == other.text


@pytest.mark.parametrize("units", [1, 3, 5])
def test_an_evaluation_batch_continues(tmp_path, units):
    undisturbed = generator().generate_evaluation_batch(PROBLEMS, group=2)
    with pytest.raises(KeyboardInterrupt):
        generator(RolloutStore(tmp_path), interrupt_after(units)).generate_evaluation_batch(
            PROBLEMS, group=2
        )
    assert len(RolloutStore(tmp_path)) == units
    seen = []
    resumed = generator(RolloutStore(tmp_path), seen.append).generate_evaluation_batch(
        PROBLEMS, group=2
    )
    assert_same(resumed, undisturbed)
    # What was finished was not drawn again: the first units cost no tokens.
    assert [told.tokens for told in seen if told.finished_unit][:units] == [0] * units
    assert seen[-1].rollouts == seen[-1].total == 24
    assert 0 < seen[-1].tokens < int(resumed.tokens_N.sum())


@pytest.mark.parametrize(
    ("rollouts", "batch_size", "sizes"),
    [
        (31, 64, [31]),
        (32, 64, [8, 8, 8, 8]),
        (33, 64, [9, 9, 9, 6]),
        (64, 10, [10] * 6 + [4]),
        (64, 64, [16] * 4),
    ],
)
def test_a_large_batch_has_units_to_keep(rollouts, batch_size, sizes):
    many = [Problem(id=str(i), prompt=f"{i}=", answer="") for i in range(rollouts)]
    seen = []
    draw = generator(None, seen.append, batch_size=batch_size, max_new_tokens=1)
    draw.generate_evaluation_batch(many)
    finished = [0, *(told.rollouts for told in seen if told.finished_unit)]
    assert [end - start for start, end in pairwise(finished)] == sizes


def test_one_unit_on_request_draws_the_same():
    many = [Problem(id=str(i), prompt="12345678"[: 1 + i % 7] + "=", answer="") for i in range(40)]
    seen = []
    options = {"batch_size": 64}
    whole = generator(None, seen.append, units=1, **options).generate_evaluation_batch(many)
    assert [told.rollouts for told in seen if told.finished_unit] == [40]
    parts = generator(None, **options).generate_evaluation_batch(many)
    for name in ("tokens_NS", "response_NS", "truncated_N"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name
    with pytest.raises(ValueError, match="units is 0; expected at least 1"):
        generator(units=0)


def test_a_batch_that_fits_at_once_continues_too(tmp_path):
    def draw(store=None, progress=None):
        return generator(store, progress, batch_size=64).generate_evaluation_batch(
            PROBLEMS, group=3
        )

    undisturbed = draw()
    with pytest.raises(KeyboardInterrupt):
        draw(RolloutStore(tmp_path), interrupt_after(2))
    assert len(RolloutStore(tmp_path)) == 2
    assert_same(draw(RolloutStore(tmp_path)), undisturbed)


@pytest.mark.parametrize("units", [1, 2, 4])
def test_an_update_batch_with_replacements_continues(tmp_path, units):
    def draw(store=None, progress=None):
        return generator(store, progress).generate_update_batch(
            PROBLEMS, prompts=4, group=2, reward=PARITY
        )

    undisturbed = draw()
    assert undisturbed.retries > 0
    with pytest.raises(KeyboardInterrupt):
        draw(RolloutStore(tmp_path), interrupt_after(units))
    resumed = draw(RolloutStore(tmp_path))
    assert_same(resumed.batch.rollouts, undisturbed.batch.rollouts)
    assert torch.equal(resumed.batch.advantage_NS, undisturbed.batch.advantage_NS)
    assert (resumed.retries, resumed.notes) == (undisturbed.retries, undisturbed.notes)


def test_a_store_of_another_policy_or_other_settings_is_refused(tmp_path):
    store = RolloutStore(tmp_path)
    generator(store).generate_evaluation_batch(PROBLEMS)
    with pytest.raises(ValueError, match=r"another policy .* model is '.*' there and '.*' here"):
        generator(store, seed=1).generate_evaluation_batch(PROBLEMS)
    with pytest.raises(ValueError, match=r"max_new_tokens is 12 there and 13 here"):
        generator(store, max_new_tokens=13).generate_evaluation_batch(PROBLEMS)
    with pytest.raises(ValueError, match=r"master_seed is 0 there and 7 here"):
        generator(store, master_seed=7).generate_evaluation_batch(PROBLEMS)


def test_the_interrupted_model_is_left_in_its_mode(tmp_path):
    draw = generator(RolloutStore(tmp_path), interrupt_after(0))
    draw.policy.model.train()
    with pytest.raises(KeyboardInterrupt):
        draw.generate_evaluation_batch(PROBLEMS)
    assert all(module.training for module in draw.policy.model.modules())


PATIENCE = 600
"""Seconds until a hang is a failure; a busy machine takes minutes for what takes seconds."""
CHILD = """
import sys
sys.path[:0] = {path!r}
import torch
torch.set_num_threads(1)
from sampling import test_sampling_resume as t
from entropy_experiments.sampling.rollout_files import RolloutStore
def slow(told):
    print(told.rollouts, flush=True)
    import time; time.sleep(0.05)
t.generator(RolloutStore(sys.argv[1]), slow, batch_size=1).generate_evaluation_batch(t.PROBLEMS)
"""


def test_a_real_ctrl_c_loses_nothing(tmp_path):
    tests = Path(__file__).parents[1]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(path=[str(tests)]), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while len(RolloutStore(tmp_path)) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=PATIENCE)
    finally:
        child.kill()
    assert "KeyboardInterrupt" in errors
    assert 3 <= len(RolloutStore(tmp_path)) < len(PROBLEMS)
    assert not list(tmp_path.glob("*.partial"))
    resumed = generator(RolloutStore(tmp_path), batch_size=1).generate_evaluation_batch(PROBLEMS)
    assert_same(resumed, generator(batch_size=1).generate_evaluation_batch(PROBLEMS))
