"""`evaluate` with a model cut over two processes: the responses and numbers of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from cli.test_cli_ranks import command, done, files, options
from entropy_experiments.checkpoints.runs import embedded_trajectory
from entropy_experiments.config import Config, parse_config
from entropy_experiments.distributed import Ranks, across
from entropy_experiments.pipelines.evaluate import evaluate_checkpoints
from entropy_experiments.pipelines.evaluation_request import EvaluationRequest, prepared
from entropy_experiments.pipelines.run_conditions import check_sharding
from tolerances import EXACT

pytestmark = pytest.mark.contract

TWO = [embedded_trajectory() / f"checkpoint-{n}" for n in (0, 40)]
ASKED = ("--prompts", "5", "--samples", "3", "--k", "1,2")
WIDE = ("checkpoint.dtype=float64",)
CUT = "checkpoint.sharding=fsdp"
SMALL = EvaluationRequest(prompts=2, samples=2)
SUMS = ("entropy_sum", "surprisal_sum")


def evaluated(out: Path, *more: str, ranks: int = 1) -> Any:
    words = [*map(str, TWO), "--out", str(out), *ASKED, *options(*WIDE, *more)]
    return done(command("evaluate", *words, ranks=ranks))


def rows_of(out: Path) -> dict[str, dict[str, list[Any]]]:
    found = sorted((out / "checkpoints").glob("*.parquet"))
    return {path.stem: pyarrow.parquet.read_table(path).to_pydict() for path in found}


@pytest.mark.slow
def test_a_sharded_model_answers_and_scores_like_a_whole_one(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    alone, shared = evaluated(one), evaluated(two, CUT, ranks=2)
    assert alone.returncode == shared.returncode == 0, alone.stderr + shared.stderr
    whole, cut = rows_of(one), rows_of(two)
    assert list(whole) == list(cut) == ["step_0", "step_40"]
    for label, rows in whole.items():
        assert cut[label].keys() == rows.keys()
        for name in rows.keys() - set(SUMS):  # texts, tokens, rewards
            assert cut[label][name] == rows[name], name
        for name in SUMS:
            assert cut[label][name] == pytest.approx(rows[name], rel=EXACT, abs=EXACT)
    # The comparison has teeth: the two checkpoints answer otherwise.
    assert whole["step_0"]["response"] != whole["step_40"]["response"]
    assert whole["step_0"]["entropy_sum"] != pytest.approx(whole["step_40"]["entropy_sum"])
    assert files(one) == files(two)  # units of rollouts too, which are named by their content
    results = [json.loads((out / "evaluation.json").read_text()) for out in (one, two)]
    tokens = [[c["high_entropy_tokens"] for c in found["checkpoints"]] for found in results]
    assert [[t["token"] for t in c] for c in tokens[0]] == [
        [t["token"] for t in c] for c in tokens[1]
    ]
    # What is finished is found again, by one process too: no model is needed.
    again = evaluated(two, CUT)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("found in") == 2


@pytest.mark.slow
def test_a_truncated_law_on_two_processes_is_refused(tmp_path):
    ended = evaluated(tmp_path / "out", CUT, "generation.top_p=0.9", ranks=2)
    assert ended.returncode != 0
    assert "sampling.top_p is 0.9 with checkpoint.sharding 'fsdp'" in ended.stderr
    assert not (tmp_path / "out").exists()


def sharded(**more: Any) -> Config:
    return parse_config({"checkpoint": {"sharding": "fsdp"}, **more})


def test_one_process_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"A sharded model in 1 process; expected several"):
        evaluate_checkpoints(TWO[:1], sharded(), request=SMALL, out=tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_a_truncated_law_is_refused():
    class Two(Ranks):
        def __init__(self) -> None:
            super().__init__()
            self.group: Any = object()

    with across(Two()):
        check_sharding(sharded(), top_p=1.0)
        with pytest.raises(ValueError, match=r"top_p is 0\.9 with checkpoint\.sharding 'fsdp'"):
            check_sharding(sharded(), top_p=0.9)
    check_sharding(parse_config({}), top_p=0.9)


def test_a_cut_model_needs_no_method_of_derivatives_to_be_evaluated():
    assert sharded().predict.method == parse_config({}).predict.method


def test_numbers_of_a_cut_model_have_a_key_of_their_own():
    """A base that training had in 4 bit is cut unquantised: not the same model."""
    cut, whole = (prepared(config, TWO[:1], SMALL) for config in (sharded(), parse_config({})))
    assert cut.key(cut.candidates[0]) != whole.key(whole.candidates[0])
    assert "sharding" not in whole.settings  # what is finished on disk stays finished
