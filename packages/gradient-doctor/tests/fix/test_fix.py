"""`gradient-doctor fix`: the diff is right, the proof is real, and nothing else is offered."""

import hashlib
import json
import math

import pytest

from fix.faults import FAULTS, FORWARD, HEAD, LOOP, script
from gradient_doctor.command import main
from gradient_doctor.findings import Finding, Severity, Site
from gradient_doctor.fix.folders import TooLargeError, check_size, copy
from gradient_doctor.fix.judge import ends, judge
from gradient_doctor.fix.recipes import RECIPES, proposals
from gradient_doctor.fix.search import Search
from gradient_doctor.fix.source import Edit, Source, UnsureError
from gradient_doctor.fix.trial import Plan, Trial


@pytest.fixture
def fix(tmp_path, monkeypatch, capsys):
    """Run the command on a source; its JSON, exit code and the file's bytes before and after."""
    monkeypatch.chdir(tmp_path)

    def run(source, *options):
        path = tmp_path / "train.py"
        path.write_text(source)
        code = main(["fix", "--quiet", "--json", "-", *options, "train.py"])
        return json.loads(capsys.readouterr().out), code, path

    return run


QUICK = ("no_grad decorator", "layer in forward")  # of the fast tier


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAULTS]
)
def test_a_fault_gets_a_proven_fix(fix, name):
    number, source, lines, parameter = FAULTS[name]
    digest = hashlib.sha256(source.encode()).hexdigest()
    result, code, path = fix(source)
    entries = [e for e in result["findings"] if e["finding"]["number"] == number]
    assert entries, result["before"]
    assert entries[0]["proven"], entries[0]["not_offered"]
    whole = result["fix"]
    for line in lines:
        assert line in whole["diff"].splitlines(), whole["diff"]
    after = whole["after"]
    assert after["error"] is None
    assert number not in [f["number"] for f in after["findings"] if f["severity"] != "note"]
    if parameter is not None:
        assert result["before"]["moved"].get(parameter, 0) == 0
        assert after["moved"][parameter] > 0
        assert parameter in whole["now_move"]
    else:
        start, end = ends(max(after["losses"].values(), key=len))
        assert end < start
    assert code == 3  # shown, not written
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    assert [p.name for p in path.parent.iterdir()] == ["train.py"]


def test_at_least_twelve_classes_are_proven_here():
    assert len({number for number, *_ in FAULTS.values()}) >= 12
    assert {number for number, *_ in FAULTS.values()} <= set(RECIPES)


@pytest.mark.slow
def test_two_faults_are_mended_one_at_a_time_and_together(fix):
    result, _, _ = fix(script(
        ("h = torch.tanh(self.body(x)).detach()", "return self.head(h)"),
        (LOOP[0], *LOOP[2:]),
    ))  # fmt: skip
    assert [e["proven"] for e in result["findings"]] == [True, True]
    assert len(result["fix"]["what"]) == 2
    assert not [f for f in result["fix"]["after"]["findings"] if f["severity"] != "note"]


# not offered


def test_a_healthy_script_has_nothing_to_fix(fix):
    result, code, _ = fix(script())
    assert (result["fix"], result["findings"], code) == (None, [], 0)


def test_a_change_that_breaks_the_script_is_not_offered(fix):
    """The code needs a plain number: without .item() it raises."""
    lines = ("h = torch.tanh(self.body(x)).detach()", "assert not h.requires_grad", FORWARD[1])
    result, code, _ = fix(script(lines))
    assert result["fix"] is None
    assert "ends with AssertionError" in " ".join(result["findings"][0]["not_offered"])
    assert code == 3


def test_a_change_that_does_not_help_is_not_offered(tmp_path):
    """Whatever is changed, the run stays as it was."""
    path = tmp_path / "train.py"
    path.write_text("def f(x):\n    return x.detach()\n")
    finding = Finding(3, Severity.ERROR, "Cut.", "`detach`", "", Site(str(path), 2), ("m.a",))
    same = Trial(steps=4, losses={"l": [2.0, 1.0]}, moved={"m.a": 0.0}, findings=(finding,))
    changed = []

    def run(plan, files):
        changed.append(files)
        return same

    plan = Plan(program=("train.py",), steps=4, timeout=1.0, roots=(str(tmp_path),))
    outcome = Search(plan, run, lambda line: None).outcome()
    assert changed == [{}, {str(path): b"def f(x):\n    return x\n"}]
    assert outcome.whole is None
    assert "not offered: the finding is still there" in outcome.attempts[0].reasons[0]


def test_an_edit_that_cannot_be_located_is_not_tried(fix):
    """The layer's size exists in forward only."""
    lines = (
        FORWARD[0], "width = h.size(1)", "mix = nn.Linear(width, width)",
        "return self.head(mix(h))",
    )  # fmt: skip
    result, _, _ = fix(script(lines))
    assert result["fix"] is None
    assert "width exists in forward only" in " ".join(result["findings"][0]["not_offered"])


def test_a_script_that_raises_for_its_own_reasons_gives_1(fix):
    result, code, _ = fix(HEAD + "raise RuntimeError('no data')\n")
    assert result["before"]["error"] == "RuntimeError: no data"
    assert (result["fix"], code) == (None, 1)


@pytest.mark.slow
def test_a_line_of_a_library_is_left_alone(fix, tmp_path):
    package = tmp_path / "site-packages"
    package.mkdir()
    package.joinpath("lib.py").write_text("def cut(h):\n    return h.detach()\n")
    source = "import sys\nsys.path.insert(0, 'site-packages')\nfrom lib import cut\n" + script(
        ("h = cut(torch.tanh(self.body(x)))", FORWARD[1])
    )
    before = package.joinpath("lib.py").read_bytes()
    result, _, _ = fix(source)
    assert result["before"]["moved"]["net.body.weight"] == 0
    assert package.joinpath("lib.py").read_bytes() == before
    assert result["fix"] is None


# writing


def test_write_writes_the_proven_fix_and_keeps_the_file_as_it_was(fix):
    _, source, _, _ = FAULTS["no_grad block"]
    result, code, path = fix(source, "--write")
    assert code == 0
    assert "no_grad" not in path.read_text()
    assert path.with_name("train.py.bak").read_text() == source
    assert result["written"] == [[str(path), f"{path}.bak"]]
    assert main(["fix", "--quiet", "train.py"]) == 0


def test_a_fix_that_cannot_be_written_gives_2(fix, monkeypatch, capsys):
    _, source, _, _ = FAULTS["no_grad block"]

    def refuse(changes):
        raise PermissionError(13, "Permission denied", "train.py")

    monkeypatch.setattr("gradient_doctor.fix.writing.replace_all", refuse)
    with pytest.raises(SystemExit) as ended:
        fix(source, "--write")
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "train.py could not be written (Permission denied); nothing was written" in error


@pytest.mark.slow
def test_what_the_script_writes_is_thrown_away(fix):
    source = FAULTS["detach"][1] + "\nopen('made.txt', 'w').write('x')\n"
    _, _, path = fix(source)
    assert [p.name for p in path.parent.iterdir()] == ["train.py"]


def test_the_text_shows_diff_and_proof(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(FAULTS["detach"][1])
    assert main(["fix", "train.py"]) == 3
    screen = capsys.readouterr()
    assert "the script is run once as it is and once for each change, 40 steps" in screen.err
    assert "ERROR [3 explicit-cut]" in screen.out
    assert "now move (2): net.body.weight, net.body.bias" in screen.out
    assert "--- a/train.py" in screen.out
    assert "# Nothing was written." in screen.out


# bad usage


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script given"),
        (["nowhere.py"], "no script at 'nowhere.py'"),
        (["--steps", "0", "train.py"], "--steps is 0; expected at least 1"),
        (["--timeout", "0", "train.py"], "--timeout is 0; expected more than 0 seconds"),
        (["-m"], "-m needs the name of a module"),
        (["--json", "no/such/x.json", "train.py"], "expected a file in a folder that exists"),
    ],
)
def test_bad_usage_gives_2(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["fix", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_several_processes_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "train.py").write_text("")
    with pytest.raises(SystemExit):
        main(["fix", "train.py"])
    assert "start it without torchrun" in capsys.readouterr().err


def test_a_large_folder_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gradient_doctor.fix.folders.LIMIT_FILES", 1)
    for name in ("train.py", "data.bin"):
        (tmp_path / name).write_text("")
    with pytest.raises(SystemExit):
        main(["fix", "train.py"])
    assert "each trial runs in a copy of it" in capsys.readouterr().err


# edits


def test_a_string_of_several_lines_is_not_indented_anew():
    text = 'with a:\n    s = """\n    x\n"""\n    t = 1\n'
    source = Source("f.py", text.encode())
    edited = source.edited([source.unwrap(source.statement(1))])
    assert edited == 's = """\n    x\n"""\nt = 1\n'


def test_line_ends_and_letters_beyond_ascii_are_kept():
    text = "with a:\r\n    é = x.detach()  # ü\r\n"
    source = Source("f.py", text.encode())
    finding = Finding(3, Severity.ERROR, "", "`detach`", "", Site("f.py", 2))
    (proposal,) = proposals(finding, source)
    assert source.edited(proposal.edits) == "with a:\r\n    é = x  # ü\r\n"


def test_edits_that_overlap_are_refused():
    source = Source("f.py", b"abc = 1\n")
    edits = [Edit(start=0, end=3, text="x"), Edit(start=1, end=2, text="y")]
    with pytest.raises(UnsureError, match=r"two edits of f\.py overlap"):
        source.edited(edits)


def test_an_edit_that_gives_no_python_is_refused():
    source = Source("f.py", b"abc = 1\n")
    with pytest.raises(UnsureError, match="is no Python"):
        source.edited([Edit(start=0, end=3, text="(")])


# the judge


TARGET = Finding(2, Severity.ERROR, "w", "y", "f", Site("f.py", 1), ("m.a",))
BEFORE = Trial(steps=4, losses={"f.py:9": [2.0, 1.0]}, moved={"m.a": 0.0, "m.b": 0.1},
               findings=(TARGET,))  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"moved": {"m.a": 0.0, "m.b": 0.2}}, "m.a still does not move"),
        ({"moved": {"m.a": 0.1, "m.b": 0.0}}, "it stops m.b"),
        ({"findings": (TARGET,)}, "the finding is still there"),
        ({"findings": (Finding(5, Severity.WARNING, "Idle.", "", ""),)}, "it brings a new finding"),
        ({"losses": {"f.py:9": [2.0, math.nan]}}, "the loss is not finite"),
        ({"error": "ValueError: x"}, "the changed script ends with ValueError: x"),
        ({"steps": 3}, "takes 3 steps instead of 4"),
    ],
)
def test_what_proves_a_fix(changes, reason):
    after = {"steps": 4, "losses": {"f.py:9": [2.0, 1.0]}, "moved": {"m.a": 0.1, "m.b": 0.1}}
    verdict = judge([TARGET], BEFORE, Trial(**{**after, **changes}), {})
    assert verdict.proven == (not reason)
    assert reason in verdict.reason


def test_a_link_leads_into_the_copy(tmp_path):
    """A script that writes through it changes the copy; what lies outside is refused."""
    here, outside = tmp_path / "here", tmp_path / "outside"
    (here / "runs").mkdir(parents=True)
    outside.mkdir()
    (here / "runs" / "model.pt").write_text("mine")
    (here / "latest").symlink_to(here / "runs")
    (here / "best.pt").symlink_to(here / "runs" / "model.pt")
    folders = (str(here.resolve()),)
    check_size(folders, link=False)
    copied = copy(folders, tmp_path / "trial", {}, link=False)
    for name in ("latest/model.pt", "best.pt"):
        with open(copied.there(str(here.resolve() / name)), "w") as file:
            file.write("a trial")
    assert (here / "runs" / "model.pt").read_text() == "mine"
    (here / "scratch").symlink_to(outside)
    with pytest.raises(TooLargeError, match=r"scratch leads to .*outside of what is copied"):
        check_size(folders, link=False)
    check_size(folders, link=True)
