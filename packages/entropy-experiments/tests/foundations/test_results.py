"""Results name their schema; files from before they did are read, and newer ones are refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import get_type_hints

import pytest

from entropy_experiments import results
from entropy_experiments.results import (
    PROBE_LOG,
    TRAINING_ROW,
    Schema,
    newest_log,
    numbers,
    read_evaluation,
    read_log,
    read_measurements,
    read_rows,
    read_training_summary,
    read_trajectory,
)
from entropy_experiments.types import Estimand, Estimate

SCHEMAS = {name: value for name, value in vars(results).items() if isinstance(value, Schema)}
CORE = {"level": "minimal", "checkpoint": "step_1", "learning_rate": 0.1, "H_orig": 1.0}
ROW = {"step": 3, "entropy": 0.5, "predicted": -0.1, "measured": None, "trusted": 1.0}


def test_every_schema_has_a_name_of_its_own():
    assert len({schema.name for schema in SCHEMAS.values()}) == len(SCHEMAS) == 9
    for schema in SCHEMAS.values():
        assert schema.stamp == {"format": schema.name, "schema": schema.version}


@pytest.mark.parametrize("name", SCHEMAS)
def test_its_own_stamp_is_read_and_a_newer_one_is_refused(name):
    schema = SCHEMAS[name]
    schema.check(dict(schema.stamp), "x.json", advice="Make it again.")
    newer = {**schema.stamp, "schema": schema.version + 1}
    expected = (
        rf"x\.json has format '{schema.name}', schema {schema.version + 1}; this version reads "
        rf".*schema {schema.version}\. A newer version .* upgrade\. Or: Make it again\."
    )
    with pytest.raises(ValueError, match=expected):
        schema.check(newer, "x.json", advice="Make it again.")


@pytest.mark.parametrize("name", SCHEMAS)
def test_another_layout_is_refused_without_advice_to_upgrade(name):
    schema = SCHEMAS[name]
    with pytest.raises(ValueError, match=r"format 'other'.* Make it again\.$") as refused:
        schema.check({"format": "other", "schema": 99}, "x.json", advice="Make it again.")
    assert "newer" not in str(refused.value)


@pytest.mark.parametrize("older", [{}, {"schema": 1}])
def test_logs_and_rows_from_before_they_had_a_name_are_read(tmp_path: Path, older):
    log = tmp_path / "entropy_probe_x.json.gz"
    log.write_bytes(gzip.compress(json.dumps({**older, **CORE}).encode()))
    assert read_log(log)["H_orig"] == 1.0
    rows = tmp_path / "entropy_probe.jsonl"
    rows.write_text(json.dumps({**older, **ROW}) + "\n")
    assert [row["step"] for row in read_rows(rows)] == [3]


def test_readers_refuse_a_newer_version_by_file(tmp_path: Path):
    path = tmp_path / "entropy_probe_x.json"
    path.write_text(json.dumps({**PROBE_LOG.stamp, **CORE, "schema": 2}))
    with pytest.raises(ValueError, match=r"entropy_probe_x\.json .* schema 2; .* upgrade"):
        read_log(path)
    path = tmp_path / "rows.jsonl"
    good, newer = {**TRAINING_ROW.stamp, **ROW}, {**TRAINING_ROW.stamp, **ROW, "schema": 2}
    path.write_text(f"{json.dumps(good)}\n{json.dumps(newer)}\n")
    with pytest.raises(ValueError, match=r"Line 2 of .*rows\.jsonl .* schema 2; .* upgrade"):
        read_rows(path)
    for read, name in (
        (read_measurements, "MEASUREMENTS"),
        (read_trajectory, "TRAJECTORY"),
        (read_evaluation, "EVALUATION"),
        (read_training_summary, "TRAINING"),
    ):
        stamp = {**SCHEMAS[name].stamp, "schema": 99, "steps": [{}]}
        path.write_text(json.dumps(stamp))
        with pytest.raises(ValueError, match=r"schema 99; .* upgrade"):
            read(path)


@pytest.mark.parametrize(
    ("read", "name", "what"),
    [
        (read_evaluation, "evaluation.json", "evaluation"),
        (read_training_summary, "train_summary.json", "summary of a training"),
    ],
)
def test_evaluations_and_trainings_are_read_by_folder_or_refused(tmp_path: Path, read, name, what):
    path = tmp_path / name
    with pytest.raises(FileNotFoundError, match=rf"No file .*{name}; expected the {name} of"):
        read(tmp_path)
    schema = SCHEMAS["EVALUATION" if read is read_evaluation else "TRAINING"]
    path.write_text(json.dumps({**schema.stamp, "steps": 4}))
    assert read(tmp_path) == read(path) == {**schema.stamp, "steps": 4}
    path.write_text('{"format": ')
    with pytest.raises(ValueError, match=rf"{name} is not JSON .*\. R"):
        read(path)
    for other in ("[]", '{"format": "other"}'):
        path.write_text(other)
        with pytest.raises(ValueError, match=rf"{name} is no {what}; expected format"):
            read(tmp_path)


def test_a_training_summary_from_before_it_had_a_name_is_read(tmp_path: Path):
    (tmp_path / "train_summary.json").write_text('{"steps": 7}')
    assert read_training_summary(tmp_path)["steps"] == 7


def test_a_row_under_way_is_not_read_and_a_torn_one_is_named(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{json.dumps(ROW)}\n{{"step": 4')
    assert [row["step"] for row in read_rows(path)] == [3]
    path.write_text(f'{{"step": 4\n{json.dumps(ROW)}\n')
    with pytest.raises(ValueError, match=r"Line 1 of .* is not JSON .* Remove the line"):
        read_rows(path)
    path.write_text("[]\n")
    with pytest.raises(ValueError, match="is no row of a probed training"):
        read_rows(path)


def test_an_estimate_has_the_keys_of_its_type():
    estimand = Estimand()
    written = numbers(Estimate.build(value=1.0, estimand=estimand, noise_floor=float("inf")))
    assert written.keys() == get_type_hints(results.EstimateResult).keys()
    assert written["noise_floor"] is None  # JSON has no infinity
    assert json.loads(json.dumps(written, allow_nan=False)) == written


def test_the_newest_log_is_the_last_by_name(tmp_path: Path):
    assert newest_log(tmp_path) is None
    day = tmp_path / "logs" / "2025-01-15"
    day.mkdir(parents=True)
    for clock in ("12-00-00", "13-00-00", "11-00-00"):
        (day / f"entropy_probe_{clock}_step_1.json.gz").touch()
        (day / f"entropy_probe_{clock}_step_1_summary.json").touch()
    newest = newest_log(tmp_path)
    assert newest is not None
    assert newest.name == "entropy_probe_13-00-00_step_1.json.gz"
