"""Ledgers and the noise scale in a training on two gloo ranks."""

from __future__ import annotations

import json

import pytest

from entropy_experiments.online.rows import read_rows
from entropy_experiments.online.trl_noise import NOISE_ROWS
from entropy_experiments.results import LEDGERS_FOLDER
from online.test_train_ranks import torchrun

pytestmark = pytest.mark.contract

SIZES = ("buffer_size=8", "microbatch_size=2", "save_steps=3", "doctor.mode=light")
ASKED = ("probe.ledger_every=2", "probe.noise_scale=true", "probe.prompts=6")


@pytest.mark.slow
def test_two_ranks_have_one_ledger_and_share_no_prompt(tmp_path):
    out = tmp_path / "run"
    options = [word for one in (*SIZES, *ASKED) for word in ("--set", one)]
    done = torchrun(out, "--preset", "tiny", "--steps", "6", "--json", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)["probe"]
    assert summary["off"] is None
    assert summary["ledgers"] == [str(out / LEDGERS_FOLDER / f"step_{n}") for n in (2, 4)]
    rows = {row["step"]: row for row in read_rows(out / "entropy_probe.jsonl")}
    for step in (2, 4):
        found = json.loads((out / LEDGERS_FOLDER / f"step_{step}" / "summary.json").read_text())
        row = rows[step]
        size = max(abs(row["predicted"]), (row["predicted_high"] - row["predicted_low"]) / 2)
        assert found["update"]["rollouts"] == 8 * 8  # of both ranks
        assert abs(found["ledger"]["predicted"]["value"] - row["predicted"]) < 1e-5 * size
    noise = [json.loads(line) for line in (out / NOISE_ROWS).read_text().splitlines()]
    assert [row["step"] for row in noise] == list(range(6))
    assert noise[-1]["shared_pairs"] == 0
    assert noise[-1]["raw"]["samples"] == 8
    assert noise[-1]["raw"]["noise"]["value"] > 0
    assert noise[-1]["raw"]["noise"]["interval"] is not None
