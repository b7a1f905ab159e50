"""`python -m gradient_doctor` and `entropy-probe doctor`: what CI and shell scripts rely on."""

import ast
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from doctor.stub import LOOP, Broken, Stub, use
from gradient_doctor import command
from gradient_doctor.command import UsageError, main, split
from gradient_doctor.findings import Severity
from gradient_doctor.output import write_text
from gradient_doctor.script import examine
from gradient_doctor.session import STRICT


@pytest.fixture
def write(tmp_path):
    def make(source, name="train.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        return str(path)

    return make


def fresh(*words, env=None, **options):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **(env or {})},
        **options,
    )


@pytest.mark.parametrize(
    ("argv", "ours", "program"),
    [
        (["a.py", "--json", "x"], [], ["a.py", "--json", "x"]),
        (["--json", "x", "a.py", "-m", "b"], ["--json", "x"], ["a.py", "-m", "b"]),
        (["--json=x", "--quiet", "a.py"], ["--json=x", "--quiet"], ["a.py"]),
        (["--quiet", "-m", "a.b", "--lr", "1"], ["--quiet"], ["-m", "a.b", "--lr", "1"]),
        (["-ma.b", "c"], [], ["-m", "a.b", "c"]),
        (["--quiet", "--", "-odd.py", "x"], ["--quiet"], ["-odd.py", "x"]),
        (["--entropy", "a:b"], ["--entropy", "a:b"], []),
    ],
)
def test_the_options_end_where_the_program_begins(argv, ours, program):
    assert split(argv) == (ours, program)


def test_modes_are_those_of_the_doctor():
    from gradient_doctor.doctor import MODES

    assert command.MODES == MODES


# exit codes


@pytest.mark.parametrize(
    ("severity", "code"),
    [(None, 0), (Severity.NOTE, 0), (Severity.WARNING, 3), (Severity.ERROR, 3)],
)
def test_findings_of_warning_or_above_give_3(write, monkeypatch, capsys, severity, code):
    use(monkeypatch, Stub, severity=severity)
    assert main([write(LOOP + "print('script said this')")]) == code
    screen = capsys.readouterr()
    assert screen.out == "script said this\n"
    if severity is None:
        assert screen.err == "\ngradient_doctor: nothing found in 4 steps.\n"
    else:
        assert f"gradient_doctor: 1 {severity.name.lower()} in 4 steps." in screen.err
        assert f"{severity.name} [5 unreachable] Found by a stub." in screen.err


@pytest.mark.parametrize(
    ("ending", "found", "code"),
    [
        ("sys.exit()", False, 0),
        ("sys.exit(0)", True, 3),
        ("sys.exit(7)", False, 7),
        ("sys.exit(7)", True, 3),
        ("sys.exit('no data')", False, 1),
        ("raise RuntimeError('odd')", False, 1),
        ("raise RuntimeError('odd')", True, 1),
        ("raise KeyboardInterrupt", True, 130),
    ],
)
def test_how_a_script_ends(write, monkeypatch, capsys, ending, found, code):
    use(monkeypatch, Stub, severity=Severity.WARNING if found else None)
    assert main([write(f"{LOOP}import sys\n{ending}\n")]) == code
    err = capsys.readouterr().err
    assert ("gradient_doctor: 1 warning" in err) is found
    if "odd" in ending:
        # the script's own traceback: no line of ours in it
        shown = err.split("\n\ngradient_doctor:")[0]
        assert "train.py" in shown
        assert "gradient_doctor/" not in shown
        assert shown.count("RuntimeError: odd") == 1
        assert ("Found by a stub" in shown) is found  # as a note of the error
    if "no data" in ending:
        assert err.startswith("no data\n")


def test_a_syntax_error_is_the_scripts_crash(write, capsys):
    assert main([write("def (:\n")]) == 1
    assert "SyntaxError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script given: name a Python file, or -m and a module"),
        (["nowhere.py"], "no script at 'nowhere.py' (not there)"),
        (["-m"], "-m needs the name of a module"),
        (["-m", "no_such_package.train"], "no module 'no_such_package.train' to run"),
        (["-m", "email"], "no module 'email.__main__' to run"),
        (["--mode", "fast", "{script}"], "'fast'"),
        (["--every", "0", "{script}"], "every (0) must be at least 1"),
        (["--contract", "nowhere.json", "{script}"], "--contract nowhere.json: No such file"),
        (["--contract", "{script}", "{script}"], "is not JSON"),
        (["--contract", "{list}", "{script}"], "holds a list, expected an object"),
        (["--contract", "{key}", "{script}"], "unknown keys ['trainible']"),
        (["--contract", "{text}", "{script}"], "expected a list such as"),
        (["--contract", "{dtype}", "{script}"], "is 'floaty'; expected a dtype such as"),
        (["--json", "no/folder.json", "{script}"], "a file in a folder that exists"),
        (["--entropy", "a:b", "{script}"], "takes no script"),
    ],
)
def test_bad_usage_runs_nothing(write, capsys, words, message):
    files = {
        "script": write("print('was run')"),
        "list": write("[]", "list.json"),
        "key": write('{"trainible": []}', "key.json"),
        "text": write('{"trainable": "policy.*"}', "text.json"),
        "dtype": write('{"dtype": {"policy.*": "floaty"}}', "dtype.json"),
    }
    words = [word.format(**files) for word in words]
    with pytest.raises(SystemExit) as leaving:
        main(words)
    assert leaving.value.code == 2
    screen = capsys.readouterr()
    assert message in screen.err
    assert "usage:" in screen.err
    assert "Traceback" not in screen.err
    assert screen.out == ""


def test_nothing_to_examine_is_not_called_healthy(write, capsys):
    assert main([write("x = 1")]) == 0
    assert "nothing to examine: no training step was seen" in capsys.readouterr().err


def test_quiet_and_off(write, monkeypatch, capsys):
    use(monkeypatch, Stub)
    assert main(["--quiet", write(LOOP)]) == 3
    assert main(["--mode", "off", write(LOOP)]) == 0
    screen = capsys.readouterr()
    assert screen.err == screen.out == ""


# JSON


def test_json_says_what_ran_and_what_was_found(write, monkeypatch, tmp_path, capsys):
    use(monkeypatch, Stub)
    target = tmp_path / "doctor.json"
    assert main(["--json", str(target), write(LOOP), "--lr", "1"]) == 3
    found = json.loads(target.read_text())
    assert found["schema"] == 1
    assert found["program"][1:] == ["--lr", "1"]
    assert (found["mode"], found["exit_code"], found["steps"]) == ("auto", 3, 4)
    assert "error" not in found
    (finding,) = found["findings"]
    assert finding["class"] == "unreachable"
    assert finding["site"]["line"] == 7
    assert main(["--json", str(target), write("raise ValueError('odd')")]) == 1
    assert json.loads(target.read_text())["error"] == "ValueError: odd"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_json_is_whole_or_not_there(tmp_path, monkeypatch):
    target = tmp_path / "doctor.json"
    target.write_text("the last run's")

    def full(_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_text(target, "new")
    assert target.read_text() == "the last run's"
    assert [p.name for p in tmp_path.iterdir()] == ["doctor.json"]


def test_a_report_that_cannot_be_written_is_said(write, monkeypatch, tmp_path, capsys):
    def full(_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["--json", str(tmp_path / "doctor.json"), write(LOOP)]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_a_report_does_not_replace_a_pipe(write, tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SystemExit, match="2"):
        main(["--json", str(pipe), write(LOOP)])
    assert "expected a file in a folder that exists" in capsys.readouterr().err
    with pytest.raises(OSError, match="is not a regular file"):
        write_text(pipe, "new")
    assert pipe.is_fifo()


@pytest.mark.parametrize(("rank", "code", "name"), [("0", 3, "d.json"), ("2", 0, "d.rank2.json")])
def test_one_rank_speaks(write, monkeypatch, tmp_path, capsys, rank, code, name):
    use(monkeypatch, Stub)
    monkeypatch.setenv("RANK", rank)
    assert main(["--json", str(tmp_path / "d.json"), write(LOOP)]) == code
    assert (capsys.readouterr().err == "") is (rank != "0")
    assert [p.name for p in tmp_path.glob("*.json")] == [name]


# as under plain python

FACTS = """
import pickle, sys
import beside
class Thing:
    pass
assert pickle.loads(pickle.dumps(Thing())).__class__ is Thing
assert sys.modules["__main__"].Thing is Thing
spec = getattr(__spec__, 'name', None)
print([sys.argv, sys.path[0], __name__, __file__, __package__, spec, __doc__])
"""


def test_a_script_sees_what_it_would_see_without_us(write):
    write("", "beside.py")
    script = write('"""Its docstring."""\n' + FACTS)
    folder = os.path.dirname(script)
    plain = fresh("train.py", "--lr", "1", cwd=folder)
    ours = fresh("-m", "gradient_doctor", "train.py", "--lr", "1", cwd=folder)
    assert ours.returncode == 0, ours.stderr
    assert ast.literal_eval(ours.stdout) == ast.literal_eval(plain.stdout)


def test_a_module_sees_what_it_would_see_without_us(write, tmp_path):
    write("", "pkg/__init__.py")
    write("from . import beside\n" + FACTS.replace("import beside", ""), "pkg/train.py")
    write("", "pkg/beside.py")
    plain = fresh("-m", "pkg.train", "--lr", "1", cwd=tmp_path)
    ours = fresh("-m", "gradient_doctor", "-m", "pkg.train", "--lr", "1", cwd=tmp_path)
    assert ours.returncode == 0, ours.stderr
    assert ours.stdout == plain.stdout


def test_a_crash_inside_a_package_is_not_bad_usage(write, tmp_path, monkeypatch, capsys):
    write("import no_such_thing", "broken/__init__.py")
    write("", "broken/train.py")
    monkeypatch.chdir(tmp_path)
    assert main(["-m", "broken.train"]) == 1
    assert "ModuleNotFoundError: No module named 'no_such_thing'" in capsys.readouterr().err


SPAWN = """
import multiprocessing, sys
class Job:
    def __init__(self, number):
        self.number = number
def work(job):
    return Job(job.number + 1)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        print(pool.map(work, [Job(1)])[0].number, type(pool.map(work, [Job(1)])[0]) is Job)
"""


def test_classes_of_the_script_travel_to_other_processes(write):
    done = fresh("-m", "gradient_doctor", write(SPAWN))
    assert done.stdout == "2 True\n", done.stderr
    assert done.stderr.count("gradient_doctor:") == 1  # the workers are not examined


def test_this_process_is_left_as_it_was(write):
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    examine(write("import sys\nsys.path.append('x')\nsys.argv = []\n"))
    assert (sys.argv, list(sys.path), sys.modules["__main__"]) == before
    with pytest.raises(FileNotFoundError, match="no script at"):
        examine("nowhere.py")
    with pytest.raises(KeyboardInterrupt):
        examine(write("raise KeyboardInterrupt"))


def test_exceptions_of_the_script_can_be_pickled(write):
    error = examine(write("raise ValueError('odd')")).error
    assert str(pickle.loads(pickle.dumps(error))) == "odd"


def test_ctrl_c_gives_the_report_so_far(write, tmp_path):
    script = write(
        LOOP + "print('trained', flush=True)\nimport time\nwhile True:\n    time.sleep(0.05)\n"
    )
    target = tmp_path / "d.json"
    words = [sys.executable, "-m", "gradient_doctor", "--json", str(target), script]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stdout is not None
    assert running.stdout.readline() == "trained\n"
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "KeyboardInterrupt" in err
    assert "gradient_doctor: nothing found in 4 steps" in err
    assert json.loads(target.read_text())["exit_code"] == 130


def test_json_on_stdout_is_alone_there(write, monkeypatch, capsys):
    use(monkeypatch, Stub)
    assert main(["--json", "-", write(LOOP + "print('of the script')\n")]) == 3
    screen = capsys.readouterr()
    assert json.loads(screen.out)["steps"] == 4
    assert "of the script" in screen.err


def test_another_front_is_named_in_usage(capsys):
    with pytest.raises(SystemExit):
        main(["--help"], prog="entropy-probe doctor")
    assert "entropy-probe doctor train.py --lr 1e-3" in capsys.readouterr().out


def test_help_of_the_module_does_not_import_torch():
    code = """
import sys
from gradient_doctor.command import main
try:
    main(["--help"])
except SystemExit as leaving:
    assert leaving.code == 0
assert "torch" not in sys.modules
"""
    start = time.perf_counter()
    done = fresh("-c", code)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 10  # not seconds of torch, even on a busy machine
    for words in ("--contract", "Exit codes:", "torchrun"):
        assert words in done.stdout


def test_entropy_is_handed_over(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "gradient_doctor.conformance.main_entropy", lambda *words: asked.append(words) or 3
    )
    assert main(["--entropy", "a.b:c", "--json", "found.json"]) == 3
    assert asked == [("a.b:c", "found.json")]


def test_entropy_is_checked_by_one_rank(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main(["--entropy", "no_such_module:c"]) == 0


# our own mistakes


def test_a_broken_detector_ends_neither_training_nor_the_others(write, monkeypatch, caplog):
    use(monkeypatch, Broken, Stub)
    monkeypatch.delenv(STRICT)
    found = examine(write(LOOP))
    assert found.error is None
    assert found.steps == 4
    assert [f.number for f in found.findings] == [5, 0]
    assert "switched off: Broken" in found.findings[1].what
    assert "ZeroDivisionError: a mistake of our own" in found.findings[1].why
    assert caplog.text.count("Broken failed") == 1
    monkeypatch.setenv(STRICT, "1")
    assert isinstance(examine(write(LOOP)).error, ZeroDivisionError)


@pytest.mark.parametrize("where", ["_before", "_after"])
def test_a_broken_trace_ends_the_examination_but_not_training(write, monkeypatch, where):
    def fail(*_):
        raise ZeroDivisionError("a mistake of our own")

    use(monkeypatch, Stub)
    monkeypatch.setattr(f"gradient_doctor.trace.Trace.{where}", fail)
    monkeypatch.delenv(STRICT)
    found = examine(write(LOOP))
    assert found.error is None
    assert found.steps == 4
    # and nobody judges by half of the facts
    assert ["switched off: Trace" in f.what for f in found.findings] == [True]
    monkeypatch.setenv(STRICT, "1")
    assert isinstance(examine(write(LOOP)).error, ZeroDivisionError)


def test_usage_errors_have_a_type_of_their_own():
    with pytest.raises(UsageError, match="no script given"):
        command.run(command.Options())
