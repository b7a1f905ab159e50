"""`influence` with a model cut over the processes: one process' numbers, killed and resumed too.

What such a study cannot have is refused before anything is read, or named as absent.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from cli.test_cli_ranks import command, done, options, started, wait, workers
from entropy_experiments.config import parse_config
from entropy_experiments.distributed import Ranks, across
from entropy_experiments.pipelines.influence.runner import EntropyInfluenceRunner
from entropy_experiments.pipelines.influence.sharded import check_sharded_study
from entropy_experiments.report.html.from_study import study_data
from entropy_experiments.report.influence_tables import influence_report
from entropy_experiments.report.linearity import measured_deltas
from entropy_experiments.study_files import open_run

pytestmark = pytest.mark.contract

CUT = "checkpoint.sharding=fsdp"
ASKED = (
    *("influence.measured_rollouts=2", "influence.leave_one_out=[1]", "influence.confirm=true"),
    'influence.what_if=["drop=negative"]',
)
ONE_PROCESS = 1e-5
"""Relative to the largest, in fp32: gradients, hence widths and points, are the same bits."""
ARRAYS = {
    "eval_00_rollout_influence.npy": ONE_PROCESS,
    "eval_00_per_sequence/full/eta_0.003.npy": ONE_PROCESS,
    "eval_00_per_sequence/grad/eta_0.003.npy": 1e-3,
}
"""Directions of single rollouts come from another kind of backward, and their changes are small."""
LINES = 1e-2
"""Of a line's error bar: the spread of differences here, of the matrix in one process. A line bends
over four learning rates (0.3 % was measured)."""


class Two(Ranks):
    def __init__(self) -> None:
        super().__init__()
        self.group: Any = object()


def sharded(**influence: Any) -> dict[str, Any]:
    return {"checkpoint": {"sharding": "fsdp"}, "influence": influence}


def test_the_fisher_kernel_of_a_cut_model_is_refused_before_the_checkpoint_is_read():
    runner = EntropyInfluenceRunner(sharded(fisher=True), quiet=True)
    refusal = r"influence\.fisher is true with checkpoint\.sharding 'fsdp'; expected false: it need"
    with across(Two()), pytest.raises(ValueError, match=refusal):
        runner.run(checkpoint_path="no such checkpoint")


def test_one_process_is_refused_before_the_checkpoint_is_read():
    runner = EntropyInfluenceRunner(sharded(), quiet=True)
    with pytest.raises(ValueError, match=r"A sharded model in 1 process; expected several"):
        runner.run(checkpoint_path="no such checkpoint")


def test_the_rest_of_a_study_may_be_cut():
    with across(Two()):
        check_sharded_study(parse_config(sharded(measured_matrix=True, leave_one_out=[0])))
        with pytest.raises(ValueError, match=r"--momentum 3 with checkpoint.sharding 'fsdp'; exp"):
            check_sharded_study(parse_config(sharded()), momentum_batches=3)
        check_sharded_study(parse_config({"influence": {"fisher": True}}))


def killed(words: list[str], out: Path, stages: int) -> None:
    """kill -9 of every process, once so many stages are finished."""
    with started(words) as child:
        wait(child, lambda: len(list((out / "stages").glob("*.stage"))) >= stages)
        for worker in workers(child):
            os.kill(worker, signal.SIGKILL)
        child.kill()
        child.communicate()
    assert not (out / "manifest.json").exists(), "it was finished before it was killed"


def tokens(out: Path) -> dict[str, np.ndarray]:
    table = pyarrow.parquet.read_table(out / "tokens.parquet").to_pydict()
    names = ("influence", "stderr", "slope_logprob", "slope_entropy", "logprob", "advantage")
    return {name: np.array(table[name], dtype=float) for name in names}


def apart(one: Any, other: Any) -> float:
    one, other = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    return float(np.abs(one - other).max() / np.abs(one).max())


@pytest.mark.slow
def test_two_ranks_killed_and_resumed_give_the_study_of_one_process(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    central = "approx_delta_h.method=central"
    alone = done(command("influence", "--out", str(one), *options(*ASKED, central)))
    assert alone.returncode == 0, alone.stderr
    words = ["influence", "--out", str(two), *options(*ASKED, CUT)]
    killed(command(*words, ranks=2), two, stages=4)
    kept = {p.name: p.read_bytes() for p in (two / "stages").glob("*.stage")}
    shared = done(command(*words, ranks=2))
    assert shared.returncode == 0, shared.stderr
    assert "the optimizer step: kept from before" in shared.stderr
    after = {p.name: p.read_bytes() for p in (two / "stages").glob("*.stage")}
    assert {name: after[name] for name in kept} == kept, "a finished stage was computed again"

    whole, cut = (json.loads((out / "summary.json").read_text()) for out in (one, two))
    for name, values in tokens(one).items():
        assert apart(values, tokens(two)[name]) < ONE_PROCESS, name
    for name, allowed in ARRAYS.items():
        assert apart(np.load(one / name), np.load(two / name)) < allowed, name
    (here,), (there,) = whole["evaluations"], cut["evaluations"]
    for name in ("reliability", "rollout_reliability"):
        assert there[name] == pytest.approx(here[name], rel=ONE_PROCESS)
    for quantity in ("entropy", "reward"):
        ours, theirs = here["ledger"][quantity], there["ledger"][quantity]
        size = sum(abs(line["this_step"]) for line in ours["lines"].values())
        for name, line in ours["lines"].items():
            close = pytest.approx(line["this_step"], abs=ONE_PROCESS * size)
            assert theirs["lines"][name]["this_step"] == close
            assert theirs["lines"][name]["stderr"] == pytest.approx(line["stderr"], rel=LINES)
        for name in ("predicted", "measured"):
            close = pytest.approx(ours[name]["value"], abs=ONE_PROCESS * size)
            assert theirs[name]["value"] == close
    (asked,), (answered,) = here["what_if"], there["what_if"]
    assert answered["prediction"]["change"] == pytest.approx(
        asked["prediction"]["change"], rel=ONE_PROCESS
    )
    assert "error" not in answered["confirmation"]
    assert "error" not in there["leave_one_out"][0]

    # What is not there is named, in the files, on the terminal and in the report.
    assert whole.get("absent") is None
    assert set(cut["absent"]) == {"matrix", "fisher"}
    assert there["reconstruction"]["closes"]
    assert "matrix_residual" not in there["reconstruction"]
    assert not (two / "eval_00_delta_matrix.npy").exists()
    printed = "\n".join(influence_report(cut))
    missing = "the first-order matrix of every pair of rollouts, the Fisher kernel"
    assert f"Not in this study: {missing}" in printed
    assert "Sum rule: they add up to" in printed
    data = study_data(two)
    assert data["matrix"] is None
    assert "gradient of every single rollout" in data["absent"]["the matrix"]
    assert data["absent"]["the Fisher kernel"] == data["absent"]["the matrix"]
    slopes = [
        [delta.first_order for delta in measured_deltas(open_run(out), "eval_00", "grad")]
        for out in (one, two)
    ]
    assert apart(*slopes) < 1e-3  # of the matrix there, of the tokens here
