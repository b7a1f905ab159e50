"""Results in a notebook: the verdict and a small table, every text escaped."""

from __future__ import annotations

import copy
import json
import pickle
import re
from html.parser import HTMLParser

import pytest

from entropy_experiments.findings import results_of
from entropy_experiments.pipelines.trajectory import Trajectory, TrajectoryStep
from entropy_experiments.report.notebook import (
    InfluenceSummary,
    Ledger,
    Measurements,
    ProbeResults,
    WhatIfAnswers,
)
from entropy_experiments.types import Estimand, Estimate

pytestmark = pytest.mark.naive

BAD = "<script>alert(1)</script>"


class Cells(HTMLParser):
    """The rows of a table, and every element there is."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.tags, self._inside = [], set(), False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self._inside = True

    def handle_endtag(self, tag):
        self._inside = self._inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self._inside:
            self.rows[-1][-1] += data


def shown(held):
    text = held._repr_html_()
    found = Cells(text)
    assert found.tags <= {"p", "strong", "br", "small", "code", "table", "thead", "tbody"} | {
        *("tr", "td", "th")
    }
    assert len(text) < 20_000
    return found.rows, re.sub(r"<[^>]*>", " ", text)


def estimate(value, interval=(-0.3, 0.1)):
    return {"value": value, "interval": list(interval), "stderr": 0.05, "trusted": True}


def test_a_probe(probed):
    findings, _ = probed
    results = ProbeResults(results_of(findings))
    rows, text = shown(results)
    by_name = {row[0]: row for row in rows}
    assert float(by_name["predicted change"][1].replace("−", "-")) == pytest.approx(
        results["deltaH1"], rel=1e-2
    )
    assert by_name["measured change"][3] in ("yes", "no")
    assert "the policy’s entropy" in text
    assert findings._repr_html_() == results._repr_html_()
    assert "nats per sequence" in ProbeResults(results, unit="sequence")._repr_html_()
    assert (
        "assumed, not read from any file"
        in shown(ProbeResults({**results, "assumed": {"a": 1}}))[1]
    )


def test_it_is_a_dict_all_the_same(probed):
    results = ProbeResults(results_of(probed[0]))
    assert results == results_of(probed[0])
    for again in (copy.deepcopy(results), pickle.loads(pickle.dumps(results))):
        assert again == results
        assert again._repr_html_() == results._repr_html_()
    assert json.loads(json.dumps(results)) == json.loads(json.dumps(dict(results)))


@pytest.fixture
def summary():
    ledger = {
        "lines": {
            "momentum": {"this_step": -0.2, "eventual": None, "stderr": 0.01},
            BAD: {"this_step": 0.1, "eventual": 0.4, "stderr": None},
        },
        "predicted": estimate(-0.1),
        "curvature": None,
        "measured": estimate(-0.12),
        "unexplained": estimate(-0.02),
    }
    asked = [
        {"name": BAD, "prediction": {"total": -0.05, "change": 0.05}},
        {"name": "drop=all", "error": "nothing is left"},
    ]
    evaluation = {
        "name": "eval_00",
        "ledger": {"entropy": ledger},
        "level": {"value": 0.3},
        "doubts": [f"a doubt {BAD}"],
        "what_if": asked,
    }
    return InfluenceSummary(
        {
            "checkpoint": f"step_1{BAD}",
            "update": {"real": True},
            "evaluations": [evaluation],
            "ledger": ledger,
            "run_directory": f"runs/{BAD}",
        }
    )


def test_a_study_its_ledger_and_its_answers(summary):
    rows, text = shown(summary)
    assert ["momentum", "−0.200", "–", "0.01"] in rows
    assert ["unexplained", "−0.0200", "", "0.05"] in rows
    assert "too little to tell from nothing" in text
    assert ["drop=all", "no answer: nothing is left", "", ""] in rows
    assert isinstance(summary["ledger"], Ledger)
    rows, _ = shown(summary["ledger"])
    assert [row[0] for row in rows] == ["", "momentum", BAD, "predicted", "measured", "unexplained"]
    answers = WhatIfAnswers(
        {
            "evaluations": [
                {
                    "name": "eval_00",
                    "what_if": summary["evaluations"][0]["what_if"],
                    "entropy_budget": {"text": f"learning rate {BAD}"},
                }
            ]
        }
    )
    rows, text = shown(answers)
    assert [BAD, "−0.0500", "+0.0500", ""] in rows
    assert "learning rate" in text


def test_repeats():
    over = {"mean": -0.1, "interval": [-0.2, 0.0], "stderr": 0.05, "repeats": 2, "trusted": 2}
    found = Measurements(
        {
            "checkpoint": BAD,
            "repeats": [1, 2],
            "summary": [{"eta": 0.003, "measured": over, "linear": over}],
        }
    )
    rows, text = shown(found)
    assert rows == [["η", "measured", "linear"], ["0.003", *["−0.100 (−0.20 to 0)"] * 2]]
    assert "2 repeats" in text


def test_a_trajectory():
    def one(value):
        return Estimate.build(value=value, estimand=Estimand())

    steps = tuple(
        TrajectoryStep(
            name=f"step_{at}",
            step=at,
            level=one(0.3),
            predicted=one(-0.1),
            second_order=one(-0.15),
            measured=one(-0.2),
            reward=None,
        )
        for at in (4, 5)
    )
    rows, text = shown(Trajectory(steps=steps, last=one(0.1)))
    assert [row[:2] for row in rows[1:]] == [
        ["predicted", "−0.200"],
        ["second_order", "−0.300"],
        ["measured", "−0.400"],
        ["fresh", "−0.200"],
    ]
    assert "from step 4 to step 6" in text
