"""The files of a run's ledger: every table adds up to the same number, and damage is refused."""

from __future__ import annotations

import json
import re

import pytest

from checkout import DOCS
from entropy_experiments.attribution.token_classes import token_class
from entropy_experiments.pipelines.run_ledger.files import prompt_id
from entropy_experiments.results.run_ledger import (
    LAYER_TABLE,
    PROMPT_TABLE,
    TABLES,
    TEXT_TABLE,
    TOKEN_CLASSES,
    TOKEN_TABLE,
    is_run_ledger,
    read_ledger_table,
    read_run_ledger,
)
from oracles.run_ledger_example import example_run_ledger


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return example_run_ledger(tmp_path_factory.mktemp("ledger") / "run")


def test_every_table_adds_up_to_the_line_of_the_batches(run):
    line = read_run_ledger(run)["lines"]["batches"]
    for name in (TOKEN_TABLE, PROMPT_TABLE, TEXT_TABLE, LAYER_TABLE):
        table = read_ledger_table(run, name)
        assert table.column_names == [column.name for column in TABLES[name]]
        assert sum(table.column("dH").to_pylist()) == pytest.approx(line["dH"], abs=1e-12)
        assert sum(table.column("dR").to_pylist()) == pytest.approx(line["dR"], abs=1e-12)


def test_groups_are_the_sums_of_their_tokens(run):
    tokens = read_ledger_table(run, TOKEN_TABLE).to_pylist()
    for name, by in ((PROMPT_TABLE, "prompt"), (TEXT_TABLE, "text")):
        for row in read_ledger_table(run, name).to_pylist():
            own = [token for token in tokens if token[by] == row[by]]
            halves = [sum(token[half] for token in own) for half in ("dH_a", "dH_b")]
            assert row["dH"] == pytest.approx(sum(halves), abs=1e-12)
            assert row["dH_stderr"] == pytest.approx(abs(halves[0] - halves[1]), abs=1e-12)
            assert len(own) == (row["tokens"] if by == "prompt" else row["count"])
            if by == "prompt":
                assert row["rollouts"] == len({token["uid"] for token in own})


def test_without_rewards_their_columns_are_null(tmp_path):
    run = example_run_ledger(tmp_path, rewards=False)
    for name in (TOKEN_TABLE, PROMPT_TABLE, TEXT_TABLE):
        assert read_ledger_table(run, name).column("dR").null_count > 0
    assert read_ledger_table(run, PROMPT_TABLE).column("solved").null_count == 3


def test_the_same_steps_give_the_same_bytes(run, tmp_path):
    again = example_run_ledger(tmp_path)
    for path in run.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()


def test_a_folder_without_its_manifest_is_not_finished(tmp_path):
    run = example_run_ledger(tmp_path)
    assert is_run_ledger(run)
    (run / "manifest.json").unlink()
    assert not is_run_ledger(run)
    with pytest.raises(FileNotFoundError, match=r"manifest\.json of a finished `entropy-pr"):
        read_run_ledger(run)


def test_a_changed_file_is_refused(tmp_path):
    run = example_run_ledger(tmp_path)
    (run / PROMPT_TABLE).write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"by_prompt\.parquet is damaged or was changed"):
        read_ledger_table(run, PROMPT_TABLE)
    (run / TEXT_TABLE).unlink()
    with pytest.raises(FileNotFoundError, match=r"by_token_text\.parquet; expected it in a"):
        read_ledger_table(run, TEXT_TABLE)
    with pytest.raises(ValueError, match=r"Got the table 'x'; expected one of run_ledger\.parquet"):
        read_ledger_table(run, "x")


def test_another_results_manifest_is_refused(tmp_path):
    run = example_run_ledger(tmp_path)
    content = json.loads((run / "manifest.json").read_bytes())
    (run / "manifest.json").write_text(json.dumps({**content, "format": "other"}))
    assert not is_run_ledger(run)
    with pytest.raises(ValueError, match="is no ledger of a run"):
        read_run_ledger(run)
    (run / "manifest.json").write_text("{")
    assert not is_run_ledger(run)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", "number"),
        (" 12", "number"),
        ("+", "operator"),
        (" =", "operator"),
        (" so", "connective"),
        ("Wait", "connective"),
        ("<answer>", "format"),
        ("</", "format"),
        ("),", "format"),
        ("<|endoftext|>", "end"),
        ("</s>", "end"),
        ("", "end"),
        ("\n", "space"),
        (" red", "word"),
        ("été", "word"),
        ("😀", "other"),
    ],
)
def test_classes_of_tokens(text, expected):
    assert token_class(text) == expected
    assert expected in TOKEN_CLASSES
    assert token_class(text, special=True) == "end"


def test_a_prompt_has_one_id():
    assert prompt_id([1, 23]) == prompt_id((1, 23)) != prompt_id([12, 3])
    assert len(prompt_id([1])) == 16


def test_the_page_names_every_column_and_key(run):
    page = (DOCS / "file_formats.md").read_text("utf-8")

    def names(title: str) -> set[str]:
        text = page.split(f"{title}\n", 1)[1].split("\n## ")[0].split("\n### ")[0]
        cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
        return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}

    columns = {column.name for table in TABLES.values() for column in table}
    assert names("### Tables of a run's ledger") == columns
    keys = names("### summary.json of a run's ledger")
    summary = read_run_ledger(run)
    assert {re.split(r"[.\[]", key)[0] for key in keys} == set(summary)
    assert {key.removeprefix("steps[].") for key in keys if key.startswith("steps[]")} == set(
        summary["steps"][0]
    )
    files = names("## The directory of a run's ledger")
    assert {path.name for path in run.iterdir()} <= files
