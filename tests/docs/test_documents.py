"""Every command and every snippet of the documents runs; every file they point to exists."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NOT_AGAIN = {"make test", "make test-all"}  # this very suite


def blocks(language):
    for document in DOCUMENTS:
        for kind, body in BLOCK.findall(document.read_text()):
            if kind == language:
                yield pytest.param(body, id=f"{document.name}:{body.splitlines()[0][:40]}")


def run(command):
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.parametrize("body", list(blocks("python")))
def test_python_snippets_run(body):
    out = run([sys.executable, "-W", "error::UserWarning", "-c", body])
    assert out.strip(), "a snippet shows something"


@pytest.mark.parametrize("body", list(blocks("bash")))
def test_shell_commands_run(body, tmp_path):
    for line in body.splitlines():
        command = line.split("#")[0].strip()
        if not command or command in NOT_AGAIN:
            continue
        words = shlex.split(command)
        assert words[0] == "make", f"only make commands are documented so far; got {command!r}"
        # The recipe itself, in this environment: `make` would set up another one.
        recipe = run(["make", "--no-print-directory", "-n", f"VENV={tmp_path}", *words[1:]])
        last = shlex.split(recipe.strip().splitlines()[-1])
        assert last[0] == f"{tmp_path}/bin/python"
        last = [word.replace("build/", f"{tmp_path}/") for word in last[1:]]
        assert run([sys.executable, *last]).strip()


def test_demo_prints_the_verdict(tmp_path):
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


def test_migration_table_names_exist():
    import entropy_experiments

    table = (ROOT / "README.md").read_text().split("## Coming from the earlier scripts")[1]
    names = re.findall(r"from entropy_experiments import (\w+)", table)
    assert len(names) >= 5
    for name in names:
        assert callable(getattr(entropy_experiments, name))


def test_importing_the_package_does_not_import_torch():
    out = run(
        [
            sys.executable,
            "-c",
            "import sys, entropy_experiments; print('torch' in sys.modules)",
        ]
    )
    assert out.strip() == "False"
