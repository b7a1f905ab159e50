"""One thread per test process, files dealt out longest first, and how long each takes."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import tiers

# pytest-xdist runs one process per core, and torch reads this when it is first imported; what a
# test starts gets one thread as well.
os.environ["OMP_NUM_THREADS"] = "1"

# A shell's background jobs ignore Ctrl-C, and so would every process that a test starts and
# interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption(
        "--record-durations",
        choices=("fast", "slow"),
        help="write the seconds of each file into tests/durations.json",
    )
    group.addoption("--outcome", type=Path, help="write how many passed, failed and were skipped")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of xdist's processes the one that sees all reports
        config.pluginmanager.register(Results(config), "results")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Longest units first: with `--dist loadfile --no-loadscope-reorder` no core waits long."""
    tier = "slow" if config.option.markexpr == "slow" else "fast"
    files = {_file(item.nodeid) for item in items}
    order = list(tiers.longest_first(files, tiers.seconds_by_file(tier)))
    place = {file: order.index(tiers.unit(file)) for file in files}
    items.sort(key=lambda item: (place[_file(item.nodeid)], _file(item.nodeid)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object):
    """`--dist loadfile`, where files that share what is dear to make count as one."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadUnits(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return tiers.unit(super()._split_scope(nodeid))

    return LoadUnits(config, log)


def pytest_collection_finish() -> None:
    """What is imported by now stays for good: the collector need not walk it again.

    torch, transformers and their like are a million objects, and every training that a test runs
    (accelerate frees memory thrice) collects in full: 0.2 s each time. Young objects are looked at
    after every 100,000 instead of 700: a tenth of the time of tests with many small tensors.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


class Results:
    """Seconds by file and outcomes of the whole session."""

    def __init__(self, config: pytest.Config):
        self.tier, self.path = config.option.record_durations, config.option.outcome
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[_file(report.nodeid)] += report.duration
        if report.outcome != "passed" or report.when == "call":
            self.outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        if self.path is not None:
            counts = Counter(self.outcomes.values())
            numbers = {name: counts[name] for name in ("passed", "failed", "skipped")}
            self.path.write_text(json.dumps(numbers))
        if self.tier is not None:
            table = json.loads(tiers.DURATIONS.read_text())
            seconds = {file: round(s, 1) for file, s in sorted(self.seconds.items())}
            table[self.tier] = {**table[self.tier], **seconds}
            present = set(tiers.test_files())
            table[self.tier] = {f: s for f, s in sorted(table[self.tier].items()) if f in present}
            tiers.DURATIONS.write_text(json.dumps(table, indent=1) + "\n")


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
