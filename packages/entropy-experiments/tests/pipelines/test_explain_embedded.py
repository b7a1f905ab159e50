"""The run shipped with the package, explained whole: it closes against fresh rollouts."""

from __future__ import annotations

import pytest

from entropy_experiments.config import load_config
from entropy_experiments.pipelines.explain import ExplainOptions, explain
from entropy_experiments.results.run_ledger import read_ledger_table

pytestmark = [pytest.mark.statistical, pytest.mark.slow]

STEPS = 56


def explained(out, prompts: int, **options):
    config = load_config(None).replaced(
        {"data.evaluation_prompts": prompts, "memory.microbatch_size": 64}
    )
    return explain(config, None, ExplainOptions(**options), out=out)


def test_the_path_is_the_measured_change(tmp_path):
    """Within the interval of H_T - H_0, and less than 5 % of the total unexplained."""
    summary = explained(tmp_path / "run", 256, responses=1)
    path, measured = summary["total"]["path"], summary["measured"]
    assert len(summary["steps"]) == STEPS
    low, high = measured["interval"]
    assert low <= path["value"] <= high
    assert abs(summary["unexplained"]["value"]) < 0.05 * abs(path["value"])
    lines = summary["lines"]
    assert sum(line["dH"] for line in lines.values()) == pytest.approx(path["value"], abs=1e-5)
    # The record begins with the run: no momentum from before.
    assert lines["momentum_before_record"]["dH"] == 0
    assert abs(lines["uncovered"]["dH"]) < 0.01 * abs(path["value"])
    rows = read_ledger_table(tmp_path / "run", "run_ledger.parquet", columns=["dH"])
    assert sum(rows.column("dH").to_pylist()) == pytest.approx(lines["batches"]["dH"], abs=1e-9)


def test_every_fifth_checkpoint_gives_the_same_numbers(tmp_path):
    """By replay of the steps between; 16 prompts, since both runs have the same rollouts."""
    dense = explained(tmp_path / "dense", 16)
    sparse = explained(tmp_path / "sparse", 16, every=5)
    # From 55 to 56 both checkpoints are stored: nothing to replay.
    assert len(sparse["replays"]) == STEPS // 5
    for name in ("batches", "decay"):
        assert sparse["lines"][name]["dH"] == pytest.approx(dense["lines"][name]["dH"], abs=1e-5)
    for mine, theirs in zip(sparse["steps"], dense["steps"], strict=True):
        assert mine["dH_batches"] == pytest.approx(theirs["dH_batches"], abs=1e-5)
