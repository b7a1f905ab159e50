"""Every command and every snippet of the documents runs; every file they point to exists.

Commands and snippets run in this process, which has the libraries in memory: starting one takes ten
seconds each. That a process of its own works as well is for test_cli, test_document_002 and the
tests that kill one.
"""

import importlib
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest
from typer.testing import CliRunner

from checkout import PACKAGE, ROOT
from entropy_experiments.cli import app

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_AGAIN = {"make test", "make test-all", "make demo"}  # this very suite; test_demo_as_it_is

LONG = (
    "howto_checkpoint.md",
    "howto_compare.md",
    "howto_online.md",
    "howto_train.md",
    "tutorial_first.md",
    "tutorial_influence.md",
    "tutorial_run.md",
)
"""Pages of many runs, or of a training: the slow tier executes them."""

QUICK = ("entropy-probe evaluate ", "evaluate_checkpoints", "import NoiseScale", "b1, steps, size")
"""Blocks of such pages that the fast tier executes all the same."""


def blocks(language):
    for document in DOCUMENTS:
        for kind, body in BLOCK.findall(document.read_text()):
            if kind == language:
                slow = document.name in LONG and not any(words in body for words in QUICK)
                yield pytest.param(
                    body,
                    id=f"{document.name}:{body.splitlines()[0][:40]}",
                    marks=[pytest.mark.slow] if slow else [],
                )


def run(command, cwd=ROOT):
    found = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """From the root of the repository for the reader; here, so that nothing is left there."""
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("body", list(blocks("python")))
def test_python_snippets_run(body, elsewhere):
    out = StringIO()
    with redirect_stdout(out):
        exec(compile(body, "a snippet", "exec"), {"__name__": "__main__"})
    assert out.getvalue().strip(), "a snippet shows something"


@pytest.mark.parametrize("body", list(blocks("bash")))
def test_shell_commands_run(body, elsewhere):
    """`console` blocks need files of the reader's own; everything in `bash` blocks runs here."""
    for line in body.splitlines():
        command = line.split("#")[0].strip()
        if not command or command in NOT_AGAIN:
            continue
        words = shlex.split(command)
        if words[0] == "entropy-probe":
            done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
            assert done.exit_code == 0, done.output
            assert done.stdout.strip()
        else:
            assert words[0] == "make", f"expected make or entropy-probe; got {command!r}"
            assert run(recipe(elsewhere, *words[1:])).strip()


def recipe(tmp_path, *goals):
    """What `make` would run last, in this environment: `make` itself would set up another one."""
    printed = run(["make", "--no-print-directory", "-n", f"VENV={tmp_path}", *goals])
    last = shlex.split(printed.strip().splitlines()[-1])
    assert last[0] == f"{tmp_path}/bin/python"
    return [sys.executable, *(word.replace("build/", f"{tmp_path}/") for word in last[1:])]


SCREEN = (
    *("predicted, summed over the steps", "measured, summed over the steps", "fresh rollouts"),
    *("The update that training made after step_13", "predicted change", "measured change"),
    *("Step certificate: the step rebuilt here is the step that was made", "momentum"),
    *("none is assumed", "trajectory.png", "entropy_probe_", "entropy-probe run --checkpoint"),
    *("most entropy-destroying tokens", "drop=negative: predicted", "made and measured"),
    *("tokens with A < 0", "unexplained", "tokens.parquet"),
)


def check_demo(out, folder):
    for words in SCREEN:
        assert words in out
    assert (folder / "figures" / "trajectory.png").stat().st_size > 10_000
    return [float(row.split()[2]) for row in out.splitlines() if "█" in row]


@pytest.mark.slow
def test_demo_shows_the_curve_and_a_verdict(tmp_path):
    # Other processes share the steps in test_demo_as_it_is and in test_workers_change_nothing.
    short = ["--first", "8", "--last", "11", "--prompts", "12", "--workers", "1"]
    out = run([sys.executable, "examples/collapse.py", "--out", str(tmp_path), *short])
    assert len(check_demo(out, tmp_path)) == 3


@pytest.mark.slow
def test_demo_as_it_is(tmp_path):
    entropy = check_demo(run(recipe(tmp_path, "demo")), tmp_path / "demo")
    assert entropy[-1] < 0.55 * entropy[0]


def test_a_policy_of_ones_own():
    out = run([sys.executable, "examples/own_policy.py"])
    for name in ("momentum", "positive", "predicted", "measured", "unexplained"):
        assert re.search(rf"^{name} +\S+", out, re.M), name
    assert "nats of this step by the token that was drawn" in out


@pytest.mark.slow
def test_example_of_a_policy_of_ones_own(tmp_path):
    figure = tmp_path / "figure.png"
    out = run([sys.executable, "examples/one_step.py", "--figure", str(figure), "--warm-up", "1"])
    for word in ("passed", "predicted change", "measured change", "fresh rollouts", "momentum"):
        assert word in out
    assert figure.stat().st_size > 10_000


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


def migration_rows(document):
    return re.findall(r"^\| (`.*) \|$", document.read_text(encoding="utf-8"), re.MULTILINE)


def test_migration_table_names_exist():
    import entropy_experiments

    rows = migration_rows(ROOT / "docs" / "migration.md")
    assert len(rows) >= 20
    names = re.findall(r"from entropy_experiments import ([\w, ]+)", "\n".join(rows))
    names = [name for one in names for name in one.split(", ")]
    assert len(names) >= 15
    for name in names:
        assert callable(getattr(entropy_experiments, name))


def test_the_earlier_paths_of_the_migration_table_import():
    """Under the package, or under its `utils`, as documents 002 and 004 have them."""
    earlier = [row.split("`")[1] for row in migration_rows(ROOT / "docs" / "migration.md")]
    paths = [name for name in earlier if "/" not in name and not name.endswith((".py", ".yaml"))]
    assert len(paths) >= 17
    for path in paths:
        module, *names = path.split(".")
        place = "" if (PACKAGE / f"{module}.py").is_file() else "utils."
        found = importlib.import_module(f"entropy_experiments.{place}{module}")
        for name in names:
            found = getattr(found, name)


def test_the_readme_fits_two_screens_and_leads_to_the_rest():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 90
    links = re.findall(r"[^!]\[[^]]+\]\(([^)]+)\)", readme)
    assert len(links) <= 15
    assert {"docs/index.md", "docs/architecture.md", "docs/migration.md"} <= set(links)
    for folder in sorted((ROOT / "packages").iterdir()):
        assert f"`packages/{folder.name}`" in readme
        assert f"./packages/{folder.name}" in readme


def test_importing_the_package_does_not_import_torch():
    out = run(
        [
            sys.executable,
            "-c",
            "import sys, entropy_experiments; print('torch' in sys.modules)",
        ]
    )
    assert out.strip() == "False"
