"""Which test runs when: the order of the fast tier, and the slow tier cut into jobs.

Files, not single tests, are dealt out, and files that share what is dear to make stay together
(`TOGETHER`), so that it is made once. Seconds are those of `durations.json`, which `pytest
--record-durations` writes; a file that is not in it yet counts as `UNKNOWN`. Longest first to
whoever has least: no job is longer than the mean plus one file or group of them, and every slow
test is in exactly one job, whatever the table says.

    python tests/tiers.py 2        # runs job 2 and notes its result in LOG.md
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path

from checkout import ROOT

DURATIONS = Path(__file__).with_name("durations.json")
LOG = ROOT / "LOG.md"
JOBS = 4
UNKNOWN = 30.0
"""Seconds of a file that nobody has timed."""
TOGETHER = {
    "a finished study": [
        "packages/entropy-experiments/tests/pipelines/test_influence.py",
        "packages/entropy-experiments/tests/pipelines/test_influence_fisher.py",
        "packages/entropy-experiments/tests/report/test_influence_plots.py",
        "packages/entropy-experiments/tests/report/test_file_formats.py",
    ],
    "a study to report on": [
        "packages/entropy-experiments/tests/report/test_html_report.py",
        "packages/entropy-experiments/tests/report/test_html_browser.py",
        "packages/entropy-experiments/tests/report/test_figures.py",
    ],
    "enumerated policies": [
        "packages/entropy-experiments/tests/estimate/test_enumerated.py",
        "packages/entropy-experiments/tests/estimate/test_arbitrary_weights.py",
    ],
    "a small probe": [
        "packages/entropy-experiments/tests/report/test_log_levels.py",
        "packages/entropy-experiments/tests/report/test_compare.py",
        "packages/entropy-experiments/tests/report/test_notebook.py",
    ],
}
"""Files by what they share: one worker makes it, once."""
_GROUP = {file: name for name, files in TOGETHER.items() for file in files}
HEADING = "| job | date | commit | passed | failed | skipped | minutes |"


def seconds_by_file(tier: str) -> dict[str, float]:
    """What each file of a tier takes, setup and teardown included; `tier` is fast or slow."""
    return json.loads(DURATIONS.read_text())[tier]


def test_files() -> list[str]:
    """Every file of tests, as pytest names it."""
    folders = [ROOT / "tests", *(ROOT / "packages").glob("*/tests")]
    files = (path for folder in folders for path in folder.rglob("test_*.py"))
    return sorted(path.relative_to(ROOT).as_posix() for path in files)


def unit(file: str) -> str:
    """What a file is dealt out with: the name of its group, or itself."""
    return _GROUP.get(file, file)


def longest_first(files: Iterable[str], seconds: Mapping[str, float]) -> dict[str, list[str]]:
    """Units and their files, in the order to begin them: a long one at the end idles a core."""
    units: defaultdict[str, list[str]] = defaultdict(list)
    for file in sorted(files):
        units[unit(file)].append(file)

    def length(name: str) -> float:
        return sum(seconds.get(file, UNKNOWN) for file in units[name])

    return {name: units[name] for name in sorted(units, key=lambda name: (-length(name), name))}


def deal(files: Iterable[str], seconds: Mapping[str, float], jobs: int) -> list[list[str]]:
    """The files of each job."""
    dealt: list[list[str]] = [[] for _ in range(jobs)]
    load = [0.0] * jobs
    for together in longest_first(files, seconds).values():
        least = load.index(min(load))
        dealt[least] += together
        load[least] += sum(seconds.get(file, UNKNOWN) for file in together)
    return dealt


def slow_job(job: int) -> list[str]:
    """The files whose slow tests are this job; 1 is the first."""
    if not 1 <= job <= JOBS:
        raise ValueError(f"There is no slow job {job}: expected 1 to {JOBS}.")
    slow, files = seconds_by_file("slow"), test_files()
    # A file without slow tests costs nothing wherever it is.
    seconds = {
        file: slow.get(file, UNKNOWN if "mark.slow" in (ROOT / file).read_text() else 0.0)
        for file in files
    }
    return deal(files, seconds, JOBS)[job - 1]


def noted(log: str, job: int, row: str) -> str:
    """The log with the last result of a job in place of the one before."""
    if HEADING not in log:
        raise ValueError(f"{LOG.name} has no table of slow jobs: expected the line {HEADING!r}.")
    before, _, rest = log.partition(HEADING)
    lines = rest.split("\n")
    end = next(n for n, line in enumerate(lines[1:], 1) if not line.startswith("|"))
    rows = {int(line.split("|")[1]): line for line in lines[2:end]}
    rows[job] = row
    table = [*lines[:2], *(rows[number] for number in sorted(rows))]
    return before + HEADING + "\n".join([*table, *lines[end:]])


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def run_slow_job(job: int, *, more: Iterable[str] = ()) -> int:
    """Run a job on all cores and note its result; pytest's exit code."""
    files = slow_job(job)
    changed = "+" if _git("status", "--porcelain", "--", "packages", "tests") else ""
    commit = _git("rev-parse", "--short", "HEAD") + changed
    outcome = ROOT / "build" / f"slow_job_{job}.json"
    outcome.parent.mkdir(exist_ok=True)
    options = ["-m", "slow", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
    started = time.monotonic()
    code = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--outcome", str(outcome), *more, *files],
        cwd=ROOT,
        check=False,
    ).returncode
    minutes = (time.monotonic() - started) / 60
    counts = json.loads(outcome.read_text())
    numbers = [counts[name] for name in ("passed", "failed", "skipped")]
    cells = [job, date.today().isoformat(), commit, *numbers, f"{minutes:.0f}"]
    LOG.write_text(noted(LOG.read_text(), job, f"| {' | '.join(map(str, cells))} |"))
    return code


if __name__ == "__main__":
    if len(sys.argv) < 2 or not sys.argv[1].isdecimal():
        sys.exit(f"Which job? make test-slow JOB=1 (1 to {JOBS}).")
    sys.exit(run_slow_job(int(sys.argv[1]), more=sys.argv[2:]))
