"""Three hundred steps of the preset `tiny` with the probe on: nothing grows, H stays in [0, ln V].

The preset as it is but for its sizes, which only make it slow: 4 prompts are learned from and 16
probed in each step, and the doctor stays away. Learning rate, schedule and record are its own.

The first hundred steps are warm-up (caches, allocator). After it a drift would show between the
second and the third hundred: a leak of one step's rollouts or scores is some MiB in all, a list
that is searched or written anew makes each step dearer than the one before.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from transformers import TrainerCallback

from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.config import load_preset
from entropy_experiments.config.training_reading import replaced
from entropy_experiments.online import trl
from entropy_experiments.online.rows import read_rows
from entropy_experiments.online.train import run
from entropy_experiments.online.watch import Throttle

pytestmark = pytest.mark.contract

STEPS, HUNDRED = 300, 100
GROWTH = 4 * 2**20
"""Bytes between the medians of two hundreds. One step's rollouts, scores and slopes are 16 x 60 x
70 bytes; kept for each step of a hundred, more than 6 MiB."""
DEARER = 0.15
"""Relative, of the median overhead; a busy machine's CPU times spread by a few per cent."""


class Meter(TrainerCallback):
    """Resident bytes and CPU seconds after each step, the probe's own apart."""

    def __init__(self, probe: Any) -> None:
        self.probe, self.process = probe, psutil.Process()
        self.bytes: list[int] = []
        self.seconds: list[tuple[float, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % 10 == 0:
            gc.collect()
            self.bytes.append(self.process.memory_info().rss)
        self.seconds.append((time.process_time(), self.probe._require_watch().throttle.seconds))

    def overheads(self) -> list[float]:
        """Of each step after the first."""
        pairs = zip(self.seconds, self.seconds[1:])
        return [
            (mine - mine_before) / ((now - before) - (mine - mine_before))
            for (before, mine_before), (now, mine) in pairs
        ]


def _metered(monkeypatch: pytest.MonkeyPatch) -> list[Meter]:
    meters: list[Meter] = []
    original = run._watchers

    def watchers(*args: Any, **options: Any) -> Any:
        probe, doctor, callbacks = original(*args, **options)
        assert probe is not None
        meters.append(Meter(probe))
        return probe, doctor, [*callbacks, meters[0]]

    monkeypatch.setattr(run, "_watchers", watchers)
    # Other people's work does not count.
    monkeypatch.setattr(trl, "Throttle", partial(Throttle, clock=time.process_time))
    return meters


@pytest.mark.slow
def test_nothing_drifts(tmp_path, monkeypatch):
    out = tmp_path / "run"
    config = replaced(
        load_preset("tiny"),
        {
            "max_steps": STEPS,
            "buffer_size": 4,
            "microbatch_size": 4,
            "probe.prompts": 16,
            "doctor.enabled": False,
            "save_steps": HUNDRED,
            "output_dir": str(out),
        },
    )
    meters = _metered(monkeypatch)
    with torch.random.fork_rng(devices=[]):
        found = run.train(config, quiet=True)
    assert found["probe"]["off"] is None
    (meter,) = meters

    rows = read_rows(out / "entropy_probe.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    top = math.log(len(load_checkpoint(out / f"checkpoint-{STEPS}").tokenizer))
    for row in rows:
        assert 0 <= row["entropy"] <= top, row
        assert 0 <= row["entropy"] + row["measured"] <= top, row
        assert row["step_mismatch"] < 1e-3, row

    second, third = (statistics.median(meter.bytes[10 * part : 10 * part + 10]) for part in (1, 2))
    assert third - second < GROWTH, meter.bytes
    before, after = (
        statistics.median(meter.overheads()[HUNDRED * part : HUNDRED * (part + 1)])
        for part in (1, 2)
    )
    assert after < (1 + DEARER) * before, (before, after)
    print(f"RSS {second / 2**20:.1f} then {third / 2**20:.1f} MiB, overhead {before} then {after}")
