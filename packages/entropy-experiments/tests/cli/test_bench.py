"""`entropy-probe bench`: which benchmarks there are, and what changed since a stored result."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from entropy_experiments.cli import app, bench

pytestmark = pytest.mark.contract


def invoke(*words):
    return CliRunner().invoke(app, ["bench", *words])


def test_every_name_is_a_program():
    home = bench._repository()
    for name in bench.BENCHMARKS:
        text = (home / "benchmarks" / f"{name}.py").read_text()
        assert '"--json"' in text or f'options(__doc__, "{name}"' in text
    assert '"--json"' in (home / "benchmarks" / "tables.py").read_text()


def test_make_bench_runs_all_of_them():
    recipe = (bench._repository() / "Makefile").read_text()
    for name in (*bench.BENCHMARKS, "summary", "plots"):
        assert f"-m benchmarks.{name}" in recipe


def test_changes_are_those_of_numbers_that_both_have():
    before = {"ours": 2.0, "ratio": {"a": 3.0, "b": 1.0}, "rounds": [1, 2], "same": 4, "old": 1}
    after = {"ours": 1.0, "ratio": {"a": 3.3, "b": 1.0}, "rounds": [3, 4], "same": 4, "new": 1}
    lines = bench.changes(before, after)
    assert [line.split() for line in lines] == [
        ["ours", "2", "1", "-50.0%"],
        ["ratio.a", "3", "3.3", "+10.0%"],
    ]


def test_a_change_says_whether_the_ranges_overlap():
    before = {"a": {"median": 2.0, "range": [1.9, 2.2]}, "b": {"median": 2.0, "range": [1.9, 2.2]}}
    after = {"a": {"median": 2.1, "range": [2.1, 2.5]}, "b": {"median": 3.0, "range": [2.8, 3.2]}}
    lines = bench.changes([before], [after])
    assert [line.split() for line in lines] == [
        ["0.a.median", "2", "2.1", "+5.0%", "ranges", "overlap"],
        ["0.b.median", "2", "3", "+50.0%", "ranges", "apart"],
    ]


def test_what_cannot_be_run_is_refused_before_anything_runs(tmp_path, monkeypatch):
    answer = invoke("speed")
    assert answer.exit_code == 2
    assert "No benchmark speed; expected some of scoring" in answer.output
    answer = invoke("entropy", "--compare", str(tmp_path))
    assert answer.exit_code == 2
    assert "entropy.json; expected a result of an earlier" in " ".join(answer.output.split())
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "a" / "b" / "c" / "bench.py"))
    monkeypatch.chdir(tmp_path)
    answer = invoke("entropy")
    assert answer.exit_code == 2
    assert "Call this from its" in answer.output


def test_results_are_written_and_compared(tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "benchmarks").mkdir(parents=True)
    (home / "benchmarks" / "__init__.py").touch()
    (home / "benchmarks" / "scoring.py").write_text(
        "import json, sys\nopen(sys.argv[-1], 'w').write(json.dumps({'speedup': 3.0}))\n"
    )
    (home / "benchmarks" / "entropy.py").write_text("raise SystemExit(3)\n")
    stored = tmp_path / "scoring.json"
    stored.write_text(json.dumps({"speedup": 2.0}))
    monkeypatch.chdir(home)
    answer = invoke("scoring", "--compare", str(stored), "--out", str(tmp_path / "out"))
    assert answer.exit_code == 0, answer.output
    assert json.loads((tmp_path / "out" / "scoring.json").read_text()) == {"speedup": 3.0}
    assert "+50.0%" in answer.output
    answer = invoke("entropy", "--out", str(tmp_path / "out"))
    assert answer.exit_code != 0
    assert "The benchmark entropy ended with code 3" in answer.output
