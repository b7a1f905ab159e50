"""`tests/verify_types.py` judges what pyright reports; pyright itself runs in `make types`."""

import verify_types
from checkout import ROOT


def report(**known):
    symbols = [
        {
            "name": name,
            "isTypeKnown": fine,
            "diagnostics": [] if fine else [{"message": "Type is missing\n  annotation"}],
        }
        for name, fine in known.items()
    ]
    return {"typeCompleteness": {"symbols": symbols, "completenessScore": 0.5}}


def test_known_names_pass():
    assert verify_types.unknown("p", ["f"], report(**{"p.f": True, "p.inner.g": False})) == {}


def test_unknown_and_absent_names_are_told_with_the_reason():
    seen = report(**{"p.C": False, "p.home.C.x": False, "p.other.y": False})
    problems = verify_types.unknown("p", ["C", "absent"], seen)
    assert problems["C"] == [
        "p.C: Type is missing annotation",
        "p.home.C.x: Type is missing annotation",
    ]
    assert "does not see it" in problems["absent"][0]


def test_it_fails_where_a_name_is_unknown(monkeypatch, capsys):
    name = "gradient_doctor.Doctor"
    monkeypatch.setattr(verify_types, "report_of", lambda _: report(**{name: False}))
    assert verify_types.main(["gradient_doctor"]) == 1
    assert "0 of 8 exported names" in capsys.readouterr().out


def test_ci_runs_it():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    types = makefile.split("\ntypes:")[1].split("\n\n")[0]
    assert "tests/verify_types.py" in types
    ci = (ROOT / ".ci" / "run").read_text("utf-8")
    assert any("types" in line.split() for line in ci.splitlines() if line.startswith("make"))
