"""The comparison of two commits' numbers sees what differs, and only that."""

from __future__ import annotations

import json

import numpy as np
import pytest

from same_numbers import TOLERANCE, differences

pytestmark = pytest.mark.contract


@pytest.fixture
def folders(tmp_path):
    for name in ("before", "now"):
        folder = tmp_path / name / "logs" / "2026-11-18"
        folder.mkdir(parents=True)
        body = {"deltaH1": -0.25, "timing": {"total": 3.0}, "trusted": True, "rows": [1.0, 2.0]}
        (folder / "entropy_probe_10-20-30_step_1_summary.json").write_text(json.dumps(body))
        np.save(tmp_path / name / "matrix.npy", np.eye(3))
    return tmp_path / "before", tmp_path / "now"


def change(folder, **values):
    (file,) = folder.rglob("*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_two_equal_runs(folders):
    change(folders[1], timing={"total": 4.0}, added=1.0)
    assert list(differences(*folders)) == []


@pytest.mark.parametrize(
    ("values", "relative"),
    [
        ({"deltaH1": -0.25 * (1 + 1e-9)}, 1e-9),
        ({"rows": [1.0, 2.5]}, 0.2),
        ({"trusted": False}, None),
        ({"deltaH1": None}, None),
    ],
)
def test_a_number_that_differs(folders, values, relative):
    change(folders[1], **values)
    (row,) = differences(*folders)
    assert row.relative == (relative if relative is None else pytest.approx(relative, rel=1e-3))
    assert row.relative is None or row.relative > TOLERANCE


def test_a_number_that_is_gone(folders):
    change(folders[0], H_orig=1.5)
    assert [row.now for row in differences(*folders)] == ["absent"]


def test_a_file_that_is_gone(folders):
    (folders[1] / "matrix.npy").unlink()
    assert [(row.place, row.now) for row in differences(*folders)] == [("matrix.npy", "none")]


@pytest.mark.parametrize("array", [np.eye(3) * (1 + 1e-6), np.eye(4), np.eye(3, dtype=np.float32)])
def test_an_array_that_differs(folders, array):
    np.save(folders[1] / "matrix.npy", array)
    (row,) = differences(*folders)
    assert row.relative > TOLERANCE
