"""Hostile input ends in one sentence: no traceback, no code, nothing half-written, soon.

Forty cases of all families run always, the others are slow (`make test-slow`). docs/promises.md
says what is promised, and how many cases hold each promise.
"""

from __future__ import annotations

import random
import re

import pytest
import typer

from checkout import DOCS
from hostile.cases import CASES, FAMILIES, by_family
from hostile.harness import Box, Case, Outcome, ended, faults_of

QUICK = 40
PAGE = DOCS / "promises.md"


def named(cases):
    return [pytest.param(case, id=case.id) for case in cases]


def judged(case, folder, patch):
    box, outcome = ended(case, folder, patch)
    found = faults_of(case, box, outcome)
    assert not found, f"{case.id}: {'; '.join(found)}\n{outcome.stderr[-2000:]}"


@pytest.mark.parametrize("case", named(case for case in CASES if case.quick))
def test_hostile(case, tmp_path, monkeypatch):
    judged(case, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", named(case for case in CASES if not case.quick))
def test_hostile_slowly(case, tmp_path, monkeypatch):
    judged(case, tmp_path, monkeypatch)


def test_a_fixed_few_of_every_family_run_always():
    assert sum(case.quick for case in CASES) == QUICK
    assert {case.family for case in CASES if case.quick} == {f.family for f in FAMILIES}
    assert len(CASES) >= 400
    assert len({case.id for case in CASES}) == len(CASES)


def test_the_page_says_how_many():
    rows = dict(re.findall(r"^\| ([a-z' ]+) \| (\d+) \|", PAGE.read_text(), re.M))
    counted = {name: str(count) for name, count in by_family().items()}
    assert rows == {**counted, "all": str(len(CASES))}


def test_cases_come_from_seeds(tmp_path):
    """The same case twice writes the same input."""
    case = next(case for case in CASES if case.id == "configuration/seed 3")
    written = []
    for name in ("one", "two"):
        with pytest.MonkeyPatch.context() as patch:
            box = Box(folder=tmp_path / name, rng=random.Random(case.id), patch=patch)
            case.make(box)
            written.append((box.folder / "probe.yaml").read_bytes())
    assert written[0] == written[1]


# The judge itself.


def nothing(box):
    return []


CASE = Case(family="x", name="x", make=nothing, ends=(2,), names=("config.json",))
GOOD = {
    "code": 2,
    "stdout": "",
    "stderr": "Error: config.json is wrong.\n",
    "exception": None,
    "seconds": 0.1,
    "gigabytes": 0.0,
}


@pytest.fixture
def box(tmp_path, monkeypatch):
    return Box(folder=tmp_path, rng=random.Random(0), patch=monkeypatch)


def test_a_good_ending_has_no_faults(box):
    assert faults_of(CASE, box, Outcome(**GOOD)) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"code": 1}, "exit code 1; expected 2"),
        ({"code": 0}, "exit code 0; expected 2"),
        ({"stderr": "Error: it is wrong.\n"}, "does not name 'config.json'"),
        ({"stderr": "config.json is wrong"}, "not one sentence"),
        ({"stderr": "Error: config.json\nand more\n"}, "not one sentence"),
        ({"stderr": "Error: config.json \x1b[31m\n"}, "control characters"),
        ({"stderr": "Error: config.json \u202e\n"}, "control characters"),
        ({"stderr": "Error: config.json" + "x" * 5000}, "a message of 50"),
        ({"stdout": "Traceback (most recent call last)"}, "a traceback"),
        ({"exception": KeyError("x")}, "ended with KeyError"),
        ({"seconds": 31.0}, "31 s"),
        ({"gigabytes": 2.5}, "2.5 GB more"),
    ],
)
def test_the_judge_has_teeth(box, change, fault):
    assert any(fault in one for one in faults_of(CASE, box, Outcome(**{**GOOD, **change})))


def test_the_judge_sees_canaries_and_halves(box):
    box.canary.write_text("")
    box.path("out/deep/.x.7.partial").write_text("")
    found = faults_of(CASE, box, Outcome(**GOOD))
    assert any("executed" in one for one in found)
    assert any("half-written" in one for one in found)


def test_a_bug_of_ours_is_still_a_traceback(tmp_path, monkeypatch):
    """The boundaries turn what libraries raise into sentences, and nothing that our lines raise."""
    from entropy_experiments.checkpoints import base

    def broken(*_, **__):
        return {}["a bug of ours"]

    # A line of the package, as far as the traceback can tell.
    code = broken.__code__.replace(co_filename=base.__file__)
    monkeypatch.setattr(base, "check_size", type(broken)(code, globals()))
    case = Case(family="x", name="x", make=lambda box: ["run", "--out", str(box.out), "--quiet"])
    box, outcome = ended(case, tmp_path, monkeypatch)
    assert outcome.code == 1
    assert "a traceback" in faults_of(case, box, outcome)
    assert "KeyError: 'a bug of ours'" in outcome.stderr


def test_typer_is_the_one_that_is_asked():
    assert issubclass(typer.BadParameter, typer.BadParameter.__bases__[0])
    assert typer.BadParameter.__bases__[0].__name__ == "UsageError"
