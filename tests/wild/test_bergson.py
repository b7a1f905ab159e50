"""Per-token influence by another package's forward mode, on the same batch and direction."""

import pytest

from tolerances import SLOPES_FP32
from wild.processes import run_script


def test_bergson_ours_and_autograd_agree(tmp_path):
    report = run_script("bergson", "bergson_influence.py", tmp_path)
    expected = report["autograd"]
    scale = max(map(abs, expected))
    assert len(expected) == 21
    for name in ("bergson", "ours"):
        assert report[name] == pytest.approx(expected, abs=SLOPES_FP32 * scale), name
