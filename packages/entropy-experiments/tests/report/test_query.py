"""`entropy-probe query`: the tables are the files', the SQL can read them and do nothing else."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from pathlib import Path

import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from checkout import DOCS
from entropy_experiments.artifacts import described, digest_of_json
from entropy_experiments.cli import app
from entropy_experiments.report import query
from entropy_experiments.report.query import TABLES, query_studies
from oracles.report_runs import HOSTILE, hostile_run, rows_of

pytest.importorskip("duckdb", reason="pip install 'entropy-experiments[query]'")


@pytest.fixture(scope="module")
def runs(report_run, tmp_path_factory):
    """Two finished studies below a folder, one that is not finished, and other folders."""
    folder = tmp_path_factory.mktemp("runs")
    leave = shutil.ignore_patterns("stages", "report.html")
    shutil.copytree(report_run, folder / "one", ignore=leave)
    shutil.copytree(report_run, folder / "more" / "two", ignore=leave)
    shutil.copytree(report_run, folder / "unfinished", ignore=leave)
    (folder / "unfinished" / "manifest.json").unlink()
    (folder / "notes").mkdir()
    (folder / "notes" / "manifest.json").write_text('{"format": "another program"}')
    return folder


def ask(run, sql):
    return query_studies(run, sql).to_pylist()


def test_tokens_are_those_of_the_file(report_run):
    rows = rows_of(report_run, "tokens.parquet")
    (row,) = ask(report_run, "SELECT COUNT(*) AS n, SUM(influence) AS total FROM tokens")
    assert row["n"] == len(rows["influence"])
    assert row["total"] == pytest.approx(math.fsum(rows["influence"]), rel=1e-12)
    columns = query_studies(report_run, "SELECT * FROM tokens LIMIT 0").column_names
    assert columns[0] == "run"
    assert set(columns[1:]) == set(rows)


def test_rollouts_are_sums_of_their_tokens(report_run):
    joined = ask(
        report_run,
        "SELECT r.rollout, r.influence, r.tokens, SUM(t.influence) AS summed, COUNT(*) AS n, "
        "STRING_AGG(t.piece, '' ORDER BY t.k) AS text, r.response "
        "FROM rollouts r JOIN tokens t USING (run, rollout) GROUP BY ALL",
    )
    assert len(joined) == 8
    for row in joined:
        assert row["influence"] == pytest.approx(row["summed"], abs=1e-15)
        assert row["n"] == row["tokens"]
        assert row["text"] == row["response"]
    texts = json.loads((report_run / "update_rollouts.json").read_text())
    asked = ask(report_run, "SELECT rollout, prompt_text, reward, uid FROM rollouts ORDER BY 1")
    for text, row in zip(texts, asked, strict=True):
        assert row["prompt_text"] == text["prompt_text"]
        assert row["reward"] == text["reward"]
        assert row["uid"] is None


def test_runs_ledgers_and_evaluations_are_the_summarys(report_run):
    summary = json.loads((report_run / "summary.json").read_text())
    (run,) = ask(report_run, "SELECT * FROM runs")
    assert run["run"] == report_run.name
    assert run["predicted"] == summary["ledger"]["predicted"]["value"]
    assert run["measured"] == summary["ledger"]["measured"]["value"]
    assert run["tokens"] == summary["update"]["tokens"]
    lines = ask(report_run, "SELECT * FROM ledger WHERE quantity = 'entropy'")
    for one in summary["evaluations"]:
        mine = {x["term"]: x["this_step"] for x in lines if x["evaluation"] == one["name"]}
        assert mine == {k: v["this_step"] for k, v in one["ledger"]["entropy"]["lines"].items()}
    names = [x["evaluation"] for x in ask(report_run, "SELECT evaluation FROM evaluations")]
    assert names == ["eval_00", "eval_01"]
    counted = ask(report_run, "SELECT evaluation, COUNT(*) AS n FROM evaluation_tokens GROUP BY 1")
    assert len({row["n"] for row in counted}) == 1
    assert len(counted) == 2


def test_all_runs_of_a_folder(runs):
    rows = ask(runs, "SELECT run, COUNT(*) AS n FROM tokens GROUP BY run ORDER BY run")
    assert [row["run"] for row in rows] == ["more/two", "one"]
    assert rows[0]["n"] == rows[1]["n"]
    studies, notes = query.find_studies(runs)
    assert list(studies) == ["more/two", "one"]
    assert notes == ["unfinished is left out: the study is not finished"]


def test_a_table_of_an_earlier_version_has_no_names(report_run, tmp_path):
    """Studies of another number of folds, and those written before uid was, stand beside others."""
    copy = tmp_path / "runs" / "old"
    shutil.copytree(report_run, copy, ignore=shutil.ignore_patterns("stages", "report.html"))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest.pop("digest")
    for name in ("tokens.parquet", "eval_00_tokens.parquet"):
        table = pyarrow.parquet.read_table(copy / name)
        last = max(c for c in table.column_names if c.startswith("fold_"))
        pyarrow.parquet.write_table(table.drop_columns(["uid", last]), copy / name)
        manifest["files"][name] = described((copy / name).read_bytes())
    digest = digest_of_json(manifest)
    (copy / "manifest.json").write_text(json.dumps({**manifest, "digest": digest}))
    shutil.copytree(report_run, tmp_path / "runs" / "new")
    rows = ask(tmp_path / "runs", f"SELECT run, COUNT(uid) AS u, COUNT({last}) AS f FROM tokens "
               "GROUP BY run ORDER BY run")  # fmt: skip
    assert [row["u"] for row in rows] == [0, 0]
    assert rows[0]["f"] > 0
    assert rows[1]["f"] == 0


@pytest.mark.faults
@pytest.mark.parametrize(
    ("sql", "match"),
    [
        ("SELECT nothing FROM tokens", r"SQL: .*nothing.*Tables: runs, evaluations, ledger"),
        ("SELEC 1", r"SQL: .*syntax error"),
        ("", r"has 0 statements \[\]; expected one SELECT"),
        ("SELECT 1; SELECT 2", r"has 2 statements \['SELECT', 'SELECT'\]"),
        ("DELETE FROM tokens", r"1 statements \['DELETE'\]; expected one SELECT"),
        ("CREATE TABLE a AS SELECT 1", r"\['CREATE'\]; expected one SELECT"),
        ("COPY tokens TO 'here.csv'", r"\['COPY'\]; expected one SELECT"),
        ("ATTACH 'here.db'", r"\['ATTACH'\]; expected one SELECT"),
        ("INSTALL httpfs", r"expected one SELECT"),
        ("SET enable_external_access = true", r"\['SET'\]; expected one SELECT"),
        ("SELECT * FROM read_csv('/etc/passwd')", r"file system operations are disabled"),
        ("SELECT * FROM read_text('/etc/passwd')", r"file system operations are disabled"),
        ("SELECT * FROM '/etc/passwd'", r"SQL: "),
        ("SELECT * FROM glob('/*')", r"file system operations are disabled"),
        ("SELECT * FROM read_parquet('https://localhost/x.parquet')", r"SQL: "),
        ("SELECT * FROM tables", r"SQL: .*does not exist"),
        ("PIVOT rollouts ON prompt USING sum(influence)", r"Name the columns: PIVOT"),
        ("SELECT '\ud800'", r"The SQL is not text: .*; expected valid UTF-8"),
        (
            "SELECT t.k, t.influence, r.influence FROM tokens t JOIN rollouts r USING (rollout)",
            r"more than one column 'influence'; expected each name once",
        ),
        ("SELECT t.*, r.* FROM runs t JOIN runs r USING (run)", r"more than one column 'run', 'ch"),
    ],
)
def test_sql_reads_the_tables_and_nothing_else(report_run, tmp_path, monkeypatch, sql, match):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=match):
        query_studies(report_run, sql)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.faults
def test_folders_without_studies(tmp_path, runs):
    with pytest.raises(FileNotFoundError, match=r"No folder .*none; expected the run directory"):
        query_studies(tmp_path / "none", "SELECT 1")
    with pytest.raises(ValueError, match=r"has no finished study below it; expected run dir"):
        query_studies(tmp_path, "SELECT 1")
    with pytest.raises(FileNotFoundError, match=r"the study is not finished"):
        query_studies(runs / "unfinished", "SELECT 1")


@pytest.mark.faults
def test_a_damaged_study_is_refused(report_run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(report_run, copy)
    data = (copy / "tokens.parquet").read_bytes()
    (copy / "tokens.parquet").write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"tokens.parquet is damaged|tokens.parquet"):
        query_studies(copy, "SELECT 1")


def command(*arguments):
    return CliRunner().invoke(app, ["query", *map(str, arguments)])


def test_the_command_shows_writes_and_lists(report_run, tmp_path):
    sql = "SELECT rollout, influence, uid FROM rollouts ORDER BY rollout"
    shown = command(report_run, sql)
    assert shown.exit_code == 0, shown.output
    assert "influence" in shown.output
    assert "NULL" in shown.output
    assert "5 more rows" in command(report_run, sql, "--rows", 3).output
    files = {kind: tmp_path / "out" / f"rows.{kind}" for kind in ("csv", "json", "parquet")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", path)]
    written = command(report_run, sql, *options)
    assert written.exit_code == 0, written.output
    rows = json.loads(files["json"].read_text())
    assert len(rows) == 8
    with files["csv"].open(newline="") as file:
        again = list(csv.DictReader(file))
    assert [float(row["influence"]) for row in again] == [row["influence"] for row in rows]
    assert pyarrow.parquet.read_table(files["parquet"]).to_pylist() == rows
    listed = command(report_run).output
    for table, columns in TABLES.items():
        assert re.search(rf"^{table} \(", listed, re.MULTILINE)
        for column in columns:
            assert column in listed
    refused = command(report_run, "DROP TABLE tokens")
    assert refused.exit_code == 2
    assert "expected one SELECT" in refused.output
    assert "Traceback" not in refused.output
    assert command(report_run, "--csv", tmp_path / "x.csv").exit_code == 2


def test_numbers_that_are_none_are_null_in_json(report_run, tmp_path):
    path = tmp_path / "x.json"
    assert command(report_run, "SELECT 'nan'::DOUBLE AS x", "--json", path).exit_code == 0
    assert json.loads(path.read_text()) == [{"x": None}]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("sql", "option", "match"),
    [
        ("SELECT TIMESTAMP 'infinity' AS x", None, "Column 'x' has a timestamp"),
        ("SELECT DATE '-0044-03-15' AS x", None, "Column 'x' has a date"),
        ("SELECT TIMESTAMP 'infinity' AS x", "--csv", "Column 'x' has a timestamp"),
        ("SELECT DATE '-0044-03-15' AS x", "--json", "Column 'x' has a date"),
        ("SELECT INTERVAL 1 YEAR AS x", "--parquet", "Parquet cannot hold this result"),
        ("SELECT 1::UNION(a INT) AS x", "--parquet", "Parquet cannot hold this result"),
    ],
)
def test_values_that_cannot_be_written_are_refused(report_run, tmp_path, sql, option, match):
    target = tmp_path / "x"
    refused = command(report_run, sql, *(() if option is None else (option, target)))
    assert refused.exit_code == 2
    assert match in refused.output
    assert "::VARCHAR" in refused.output
    assert "Traceback" not in refused.output
    assert not target.exists()


@pytest.mark.faults
def test_a_result_is_not_written_into_a_study(report_run, tmp_path):
    copy = tmp_path / "runs" / "one"
    shutil.copytree(report_run, copy, ignore=shutil.ignore_patterns("stages"))
    (tmp_path / "link.json").symlink_to(copy / "summary.json")
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    targets = (
        *(copy / "summary.json", copy / "new.json", copy / "below" / "x.json"),
        *(copy / ".." / "one" / "manifest.json", tmp_path / "link.json"),
    )
    for folder in (copy, tmp_path / "runs", report_run):
        for target in targets:
            refused = command(folder, "SELECT 1 AS x", "--json", target)
            assert refused.exit_code == 2
            assert "is in the folder of a study" in refused.output
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    beside = tmp_path / "runs" / "x.json"
    assert command(tmp_path / "runs", "SELECT 1 AS x", "--json", beside).exit_code == 0
    refused = command(copy, "SELECT 1 AS x", "--json", beside, "--csv", beside)
    assert refused.exit_code == 2
    assert "is named for two results" in refused.output


def test_hostile_texts_reach_no_terminal(report_run, tmp_path):
    run = hostile_run(report_run, tmp_path / "hostile")
    changed = "FROM evaluation_tokens WHERE evaluation = 'eval_00'"
    shown = command(run, f"SELECT piece {changed}", "--rows", 1000)
    assert shown.exit_code == 0
    assert "\x1b" not in shown.output
    assert "\u202e" not in shown.output
    path = tmp_path / "all.csv"
    assert command(run, f"SELECT DISTINCT piece {changed}", "--csv", path).exit_code == 0
    with path.open(newline="", encoding="utf-8") as file:
        assert {row["piece"] for row in csv.DictReader(file)} <= set(HOSTILE)


def test_without_duckdb_the_message_says_what_to_install(report_run, monkeypatch):
    monkeypatch.setattr(query, "find_spec", lambda name: None)
    refused = command(report_run, "SELECT 1")
    assert refused.exit_code == 2
    assert "needs duckdb" in refused.output
    assert "entropy-experiments[query]" in refused.output


def test_the_page_lists_every_column():
    """docs/howto_query.md: one row per column of every table that is made here."""
    page = (DOCS / "howto_query.md").read_text("utf-8")
    for table, columns in TABLES.items():
        part = page.split(f"### {table}\n", 1)[1].split("\n### ")[0].split("\n## ")[0]
        cells = [line.strip("| ").split(" | ") for line in part.splitlines() if "| `" in line]
        assert {name.strip("`"): what.strip() for name, what in cells} == columns


def test_the_page_is_there():
    assert Path(DOCS / "howto_query.md").is_file()
