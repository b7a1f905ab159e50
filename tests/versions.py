"""The lowest and the newest versions of everything we depend on, installed and tried.

    python tests/versions.py lowest                       # every declared minimum, exactly
    python tests/versions.py newest --python python3.12   # what pip installs today

Each set gets an environment of its own in build/versions, made by pip from pyproject.toml alone:
the lowest set is the lower bounds written there, so a bound cannot be declared and not be tried.
Then the tests of `FILES` and the commands of the README run in it, and LOG.md gets a row. A
torch that was built with CUDA is used without its libraries (`hollow_cuda`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path
from typing import Literal, get_args

from packaging.requirements import Requirement

from checkout import DISTRIBUTION, PACKAGE, ROOT
from hollow_cuda import without_cuda

Set = Literal["lowest", "newest"]

HOME = ROOT / "build" / "versions"
OTHERS = tuple(ROOT / "packages" / name for name in ("gradient-doctor", "arc-refine"))
"""Plugins of `entropy-probe`: its options are tested with them."""
LOG = ROOT / "LOG.md"
EXTRAS = ("plot", "query", "report", "trl")
"""What the demo and the callback need besides the package itself."""
TOOLS = ("hypothesis", "psutil", "pytest", "pytest-xdist")
"""Of the extra `dev`: what the tests below need."""
FILES = (
    "packages/entropy-experiments/tests/cli/test_cli.py",
    "packages/entropy-experiments/tests/config/test_config.py",
    "packages/entropy-experiments/tests/pipelines/test_influence.py",
    "packages/entropy-experiments/tests/models/test_peft_lora.py",
    "packages/entropy-experiments/tests/pipelines/test_run_every_kind.py",
    "packages/entropy-experiments/tests/numerics/test_torch.py",
    "packages/entropy-experiments/tests/models/test_transformers.py",
    "packages/entropy-experiments/tests/online/test_trl_online.py",
    "packages/gradient-doctor/tests/doctor/test_clean_loops.py",
    "packages/gradient-doctor/tests/doctor/test_injections.py",
    "packages/gradient-doctor/tests/doctor/test_leaves.py",
    "packages/gradient-doctor/tests/doctor/test_robust.py",
    "packages/gradient-doctor/tests/doctor/test_untouched.py",
    "packages/entropy-experiments/tests/estimate/test_arbitrary_weights.py",
    "packages/entropy-experiments/tests/online/test_online_probe.py",
    "packages/entropy-experiments/tests/update/test_optimizer.py",
    "packages/entropy-experiments/tests/checkpoints/test_checkpoints.py",
    "packages/entropy-experiments/tests/pipelines/test_embedded_default.py",
    "packages/entropy-experiments/tests/models/test_every_architecture.py",
    "packages/entropy-experiments/tests/checkpoints/test_loading.py",
    "packages/entropy-experiments/tests/models/test_scoring.py",
)
"""Scoring, slopes against enumeration, loading, `run`, `influence`, the callback, the doctor: about
two minutes on a quiet core."""
NAMED = ("torch", "transformers", "peft", "trl", "numpy", "pydantic")
"""Packages whose versions the log shows."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
TITLE = "## Lowest and newest versions"
HEADING = "| set | Python | date | commit | passed | failed | skipped | commands | versions |"


def requirements() -> list[Requirement]:
    """What pyproject.toml declares for users with `EXTRAS`, and the tools of the tests."""
    project = tomllib.loads((DISTRIBUTION / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    tools = [Requirement(line) for line in extras["dev"]]
    return [*map(Requirement, declared), *(tool for tool in tools if tool.name in TOOLS)]


def lower_bound(requirement: Requirement) -> str:
    """The version after `>=`."""
    bounds = [part.version for part in requirement.specifier if part.operator == ">="]
    if len(bounds) != 1:
        raise ValueError(
            f"pyproject.toml declares {str(requirement)!r}; expected one lower bound (>=), which "
            "`make test-lowest` installs."
        )
    return bounds[0]


def pins(which: Set) -> list[str]:
    """What pip is held to besides pyproject.toml itself."""
    if which == "newest":
        return []
    return [f"{one.name}=={lower_bound(one)}" for one in requirements()]


def environment(which: Set, python: str) -> Path:
    """The python of the environment, which is made if it is missing or out of date."""
    version = _output(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])")
    folder = HOME / f"{which}-{version}"
    made, stamp = folder / "bin" / "python", folder / "made_of"
    wanted = _fingerprint(which, python)
    if not (stamp.is_file() and stamp.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        _install(made, which)
        stamp.write_text(wanted)  # last: what has no stamp is half-made
    return made


def _fingerprint(which: Set, python: str) -> str:
    of = [which, _output(python, "-VV")]
    of += [(folder / "pyproject.toml").read_text() for folder in (DISTRIBUTION, *OTHERS)]
    of += [Path(__file__).with_name("hollow_cuda.py").read_text()]
    # The newest of yesterday are not the newest of today.
    of += [date.today().isoformat()] if which == "newest" else []
    return hashlib.sha256("\n".join(of).encode()).hexdigest()


def _install(python: Path, which: Set) -> None:
    held = pins(which)
    (torch,) = [pin for pin in held if pin.startswith("torch==")] or ["torch"]
    # Alone and first: with its dependencies it may bring gigabytes of CUDA libraries.
    _pip(python, "--no-deps", torch)
    site_packages = Path(_output(python, "-c", "import site; print(site.getsitepackages()[0])"))
    without_cuda(site_packages)
    held = [*(pin for pin in held if pin != torch), f"torch=={version_of(python, 'torch')}"]
    constraints = python.parents[1] / "constraints.txt"
    constraints.write_text("\n".join(held) + "\n")
    tools = [str(one) for one in requirements() if one.name in TOOLS]
    package = f"{DISTRIBUTION}[{','.join(EXTRAS)}]"
    doctor, arc = map(str, OTHERS)
    # In this order: pip looks on the index for what a package before needs.
    editable = [word for path in (doctor, package, arc) for word in ("-e", path)]
    _pip(python, "-c", str(constraints), *tools, *editable)


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--no-input", *arguments], check=True)


def version_of(python: Path, package: str) -> str:
    found = f"from importlib.metadata import version; print(version({package!r}))"
    return _output(python, "-c", found)


def run_tests(python: Path, outcome: Path) -> dict[str, int]:
    """How many passed, failed and were skipped."""
    # Warnings are errors for the pinned versions; what others deprecate is seen there in time.
    options = ["-m", "not slow and not wild", "-o", "filterwarnings=default", "--disable-warnings"]
    outcome.unlink(missing_ok=True)
    done = subprocess.run(
        [python, "-m", "pytest", "-q", *options, "--outcome", outcome, *FILES],
        cwd=ROOT,
        env=_alone(),
        check=False,
    )
    if not outcome.is_file():
        raise RuntimeError(
            f"pytest of {python} ended with code {done.returncode} and without a result; expected "
            "one, whatever the tests say. See its output above: a crash, or a file that cannot be "
            "collected."
        )
    return json.loads(outcome.read_text())


def commands(python: Path, out: Path) -> dict[str, list[str]]:
    """`make demo` on two steps with few prompts, and the commands on a checkpoint of one's own."""
    probe = str(python.with_name("entropy-probe"))
    checkpoint = str(PACKAGE / "embedded" / "checkpoint-13")
    few = ["--set", "batch_config.B_E=8"]
    part = ["--prompts", "8", "--first", "12", "--last", "14", "--workers", "1"]
    return {
        "demo": [str(python), "examples/collapse.py", "--out", str(out / "demo"), *part],
        "run": [probe, "run", "--checkpoint", checkpoint, "--out", str(out / "run"), *few],
    }


def run_commands(python: Path, out: Path) -> list[str]:
    """The names of the commands that failed."""
    shutil.rmtree(out, ignore_errors=True)
    return [
        name
        for name, words in commands(python, out).items()
        if subprocess.run(words, cwd=ROOT, env=_alone(), check=False).returncode
    ]


def _alone() -> dict[str, str]:
    """This process's variables without paths into other environments or checkouts."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, **OFFLINE, "OMP_NUM_THREADS": "1"}


def noted(log: str, row: str) -> str:
    """The log with this row in place of an earlier one of the same set and Python."""
    if TITLE not in log:
        raise ValueError(f"{LOG.name} has no table of versions: expected the line {TITLE!r}.")
    before, _, rest = log.partition(HEADING)
    _, rule, *lines = rest.split("\n")
    end = next((n for n, line in enumerate(lines) if not line.startswith("|")), len(lines))
    rows = {tuple(line.split("|")[1:3]): line for line in [*lines[:end], row]}
    table = [rule, *(rows[key] for key in sorted(rows))]
    return before + HEADING + "\n" + "\n".join([*table, *lines[end:]])


def try_set(which: Set, python: str) -> int:
    """Make the environment, run tests and commands in it, note the result; 0 if all passed."""
    made = environment(which, python)
    folder = made.parents[1]
    changed = "+" if _output("git", "status", "--porcelain", "--", "packages", "tests") else ""
    commit = _output("git", "rev-parse", "--short", "HEAD") + changed
    counts = run_tests(made, folder / "outcome.json")
    failed = run_commands(made, folder / "out")
    works = ", ".join(
        f"{name} {'failed' if name in failed else 'works'}" for name in commands(made, folder)
    )
    versions = ", ".join(f"{name} {version_of(made, name)}" for name in NAMED)
    interpreter = _output(made, "-c", "import platform; print(platform.python_version())")
    numbers = [counts[name] for name in ("passed", "failed", "skipped")]
    cells = [which, interpreter, date.today().isoformat(), commit, *numbers, works, versions]
    LOG.write_text(noted(LOG.read_text(), f"| {' | '.join(map(str, cells))} |"))
    return int(bool(counts["failed"] or failed or not counts["passed"]))


def _output(*words: str | Path) -> str:
    return subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("which", choices=get_args(Set))
    parser.add_argument("--python", default=sys.executable, help="the interpreter to try")
    options = parser.parse_args()
    sys.exit(try_set(options.which, options.python))
