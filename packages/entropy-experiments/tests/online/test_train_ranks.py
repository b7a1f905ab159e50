"""Document 001's settings on two gloo ranks: 12 per rank, microbatch 4, ten steps."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from entropy_experiments.checkpoints.load import load_checkpoint
from entropy_experiments.config import Config
from entropy_experiments.online.rows import read_rows
from entropy_experiments.pipelines.training_facts import training_facts
from entropy_experiments.sampling.rollout_files import load_update_batch

pytestmark = pytest.mark.contract

STEPS = 10


def torchrun(folder: Path, *options: str, ranks: int = 2) -> subprocess.CompletedProcess:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    launch += [f"--master-port={port}", "-m", "entropy_experiments.cli", "train"]
    return subprocess.run(
        [*launch, "--out", str(folder), *options],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=900,
        check=False,
    )


@pytest.mark.slow
def test_document_001_on_two_ranks(tmp_path):
    out = tmp_path / "run"
    # Its sizes in full, and groups of 2: the steps are small, so that ten of them are quick.
    options = ("--config", "entropy_probe_test_optimized", "--set", "num_generations=2", "--json")
    done = torchrun(out, *options, "--set", "doctor.trace_steps=1", "--set", "probe.prompts=12")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert summary["steps"] == STEPS
    assert summary["probe"]["off"] is None
    rows = read_rows(out / "entropy_probe.jsonl")
    found = load_checkpoint(out / f"checkpoint-{STEPS}")
    top = math.log(len(found.tokenizer))
    assert rows[0]["step"] == 0
    for row in rows:
        assert 0 < row["entropy"] < top  # document 001's probe said 1e6
        assert row["rollouts"] == 12
        assert row["step_mismatch"] < 1e-3
    assert any(row["predicted"] != 0 for row in rows)
    for step in range(STEPS):  # the rollouts of both ranks
        batch, _ = load_update_batch(out / "record" / f"step_{step}" / "update_batch")
        assert len(batch.rollouts) == 64 * 2
    facts = training_facts(Config(), found.facts, found.fact_sources)
    assert facts.assumed == {}
    assert found.facts["B_U"] == 64

    again = tmp_path / "again"
    done = torchrun(again, *options, "--set", "doctor.enabled=false", "--steps", "5", "--no-probe")
    assert done.returncode == 0, done.stderr[-3000:]
    done = torchrun(again, "--resume", "--steps", str(STEPS), "--quiet")
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = (
        load_file(path / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
        for path in (out, again)
    )
    # Resumed in the middle, first half without probe and doctor: the same weights on two ranks.
    assert all((value == other[name]).all() for name, value in one.items())


@pytest.mark.slow
def test_sizes_that_do_not_fit_the_ranks_are_refused_on_all(tmp_path):
    done = torchrun(tmp_path / "run", "--preset", "tiny")
    assert done.returncode != 0
    assert "buffer_size: 48 prompts x 8 responses do not divide" in done.stderr
    assert not (tmp_path / "run").exists()
