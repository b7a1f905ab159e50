"""The momentum as the batches it came from: lines that add up to it, on paper and on the page."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from entropy_experiments.pipelines.run_ledger.files import table_bytes
from entropy_experiments.report.html.page import write_report
from entropy_experiments.report.influence_tables import influence_report
from entropy_experiments.report.momentum import largest, momentum_lines, shown_ledgers
from entropy_experiments.report.notebook import InfluenceSummary
from entropy_experiments.results.run_ledger import TABLES, TOKEN_TABLE
from oracles.report_runs import HOSTILE, changed

pytestmark = pytest.mark.contract


def share(value: float, stderr: float = 1e-5) -> dict:
    interval = [value - 2 * stderr, value + 2 * stderr]
    return {"dH": value, "stderr": stderr, "interval": interval}


def answer(total: float) -> dict:
    """Three batches and the rest; batch 4's interval contains 0."""
    values = {6: 0.5 * total, 5: 0.2 * total, 4: 0.1 * total}
    stderrs = {6: 1e-7, 5: 1e-7, 4: abs(total)}
    more = {"decay": 0.0, "step_distance": 0.0, "gradient_distance": 0.0}
    batches = [
        {
            "step": step,
            **share(value, stderrs[step]),
            **more,
            "weight": 0.09,
            "other_gradient": step == 5,
        }
        for step, value in values.items()
    ]
    known = math.fsum([*values.values(), 0.15 * total])
    return {
        "from": 4,
        "to": 7,
        "total": total,
        "batches": batches,
        "parts": [
            {"from": 5, "to": 6, **share(0.7 * total)},
            {"from": 4, "to": 4, **share(0.1 * total)},
        ],
        "before_record": share(0.15 * total),
        "decay": 0.0,
        "uncovered": total - known,
    }


def token_table() -> bytes:
    """A rollout of each batch, in HOSTILE words."""
    parts = []
    for step in (4, 5, 6):
        count = len(HOSTILE)
        columns = {column.name: [0.0] * count for column in TABLES[TOKEN_TABLE]}
        columns |= {"step": [step] * count, "rollout": [3] * count, "position": list(range(count))}
        columns |= {"text": list(HOSTILE), "uid": [f"{step}-3"] * count, "token_id": [1] * count}
        columns |= {"prompt": ["p"] * count, "dH": [-0.001 * (k + 1) for k in range(count)]}
        parts.append(columns)
    return table_bytes(TOKEN_TABLE, *parts)


@pytest.fixture(scope="module")
def split(report_run, tmp_path_factory) -> Path:
    """A finished study with its momentum split."""
    summary = json.loads((report_run / "summary.json").read_text())
    line = summary["ledger"]["lines"]["momentum"]["this_step"]
    summary["evaluations"][0]["momentum"] = answer(line)
    files = {"summary.json": json.dumps(summary).encode(), "momentum.parquet": token_table()}
    return changed(report_run, tmp_path_factory.mktemp("split") / "run", files)


def test_lines_add_up_to_the_momentum_that_they_replace(split):
    summary = json.loads((split / "summary.json").read_text())
    evaluation = summary["evaluations"][0]
    whole = evaluation["ledger"]["entropy"]["lines"]
    shown = shown_ledgers(evaluation)["entropy"]["lines"]
    assert list(shown)[:4] == ["batches 5 to 6", "batch 4", "batches before 4", "not covered"]
    assert list(shown)[4:] == list(whole)[1:]
    added, expected = (
        math.fsum(line["this_step"] for line in lines.values()) for lines in (shown, whole)
    )
    assert added == pytest.approx(expected, abs=1e-15)


def test_a_line_of_exactly_nothing_is_left_out():
    momentum = {**answer(-0.01), "before_record": share(0.0), "uncovered": -0.002}
    assert list(momentum_lines(momentum)) == ["batches 5 to 6", "batch 4", "not covered"]


def test_only_batches_outside_of_their_interval_are_named():
    assert [one["step"] for one in largest(answer(-0.01))] == [6, 5]


def test_the_terminal_names_the_batches(split):
    summary = json.loads((split / "summary.json").read_text())
    text = "\n".join(influence_report(summary))
    for words in ("batches 5 to 6", "batches before 4", "3 of them rebuilt", "    batch 6 "):
        assert words in text
    assert ">batches 5 to 6</td>" in InfluenceSummary(summary)._repr_html_()
    assert "of 1 of 3 batches are not those that training used (the newest: batch 5)" in text


def test_the_page_has_lines_a_section_and_tokens(split, tmp_path):
    page = write_report(split, tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<a href="#momentum">batches 5 to 6</a>' in page
    assert '<section id="momentum">' in page
    assert page.count("not the gradient that training used") == 1
    assert page.count("(rollout 3, token ") == 3 * min(8, len(HOSTILE))
    for text in HOSTILE:
        if "<" in text:
            assert f"<mark>{text}" not in page


def test_one_sentence_says_why_it_is_one_line(report_run, tmp_path):
    """The study's batch was drawn: training did not make this step."""
    summary = json.loads((report_run / "summary.json").read_text())
    reason = "training did not make this step, its batch was drawn here"
    assert summary["evaluations"][0]["momentum"]["error"].startswith(reason)
    assert any(
        line.startswith(f"Momentum is one line: {reason}") for line in influence_report(summary)
    )
    page = write_report(report_run, tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<section id="momentum">' not in page
    assert reason in page
