"""Ctrl-C during `entropy-probe run`: what was drawn stays, and the same command continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from entropy_experiments.config import load_config
from entropy_experiments.pipelines.probe import OfflineEntropyProbe

pytestmark = pytest.mark.invariant

PROMPTS, AT_ONCE = 80, 4
OVERRIDES = (
    f"batch_config.B_E={PROMPTS}",
    f"generation.gen_batch_size={AT_ONCE}",
    "memory_config.microbatch_size=16",
    "probe_rework.compute_delta_h1=false",
)
PATIENCE = 600
"""Seconds until a hang is a failure; a busy machine takes minutes for what takes seconds."""
SOME = 3
"""Finished units to wait for before the interrupt."""


def command(out: Path) -> list[str]:
    options = [word for override in OVERRIDES for word in ("--set", override)]
    run = ["run", "--config", "test_deltaH1", "--out", str(out)]
    return [sys.executable, "-m", "entropy_experiments.cli", *run, *options]


def started(out: Path) -> subprocess.Popen:
    return subprocess.Popen(
        command(out),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts jobs in the background has them ignore SIGINT, and they inherit it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def units(out: Path) -> dict[str, tuple[int, bytes]]:
    """Finished units with the time and content of each."""
    found = sorted((out / "rollouts" / "units").glob("*/*.unit"))
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in found}


def numbers(out: Path) -> dict:
    results = json.loads((out / "results.json").read_text())
    return {k: v for k, v in results.items() if k not in ("timing", "log_path")}


@pytest.mark.slow
def test_an_interrupted_run_continues_as_if_nothing_had_happened(tmp_path):
    out = tmp_path / "interrupted"
    child = started(out)
    try:
        deadline = time.monotonic() + PATIENCE
        while len(units(out)) < SOME and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        child.send_signal(signal.SIGINT)
        stdout, stderr = child.communicate(timeout=PATIENCE)
    finally:
        child.kill()
    kept = units(out)
    assert child.returncode == 130, stderr
    assert "Interrupted. Finished units of rollouts are kept in" in stderr
    assert str(out / "rollouts") in stderr
    assert "the same command continues from them" in stderr
    assert "Traceback" not in stderr
    assert stdout == ""
    assert SOME <= len(kept) < PROMPTS // AT_ONCE
    assert not list(tmp_path.rglob("*.partial"))
    assert not (out / "results.json").exists()
    assert not (out / "logs").exists()

    again = started(out)
    try:
        stdout, stderr = again.communicate(timeout=PATIENCE)
    finally:
        again.kill()
    assert again.returncode == 0, stderr
    assert "The update that training made after step_13" in stdout
    after = units(out)
    assert len(after) == PROMPTS // AT_ONCE
    for name, was in kept.items():
        assert after[name] == was, f"{name} was drawn again"

    undisturbed = tmp_path / "undisturbed"
    config = load_config("test_deltaH1").under(undisturbed).with_overrides(OVERRIDES)
    OfflineEntropyProbe(config, quiet=True).run_mixed_probe()
    assert numbers(out) == numbers(undisturbed)
    drawn = {name: content for name, (_, content) in units(undisturbed).items()}
    assert {name: content for name, (_, content) in after.items()} == drawn
