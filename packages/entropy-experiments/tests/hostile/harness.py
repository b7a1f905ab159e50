"""One hostile case: what it writes, the command it calls, and what every ending must be like.

A case is a function of a `Box` (an empty folder, a seeded generator, monkeypatch) that writes its
input and returns the arguments of `entropy-probe`, which runs in this process. `ended` calls it;
`faults_of` lists everything that is wrong with the ending, so that one run shows all of it:

    exit code 0 or 2 (a case may say which), one message, no traceback, no canary, nothing
    half-written, no control characters, at most 30 s and 2 GB more than before
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import sys
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from entropy_experiments.checkpoints.runs import embedded_trajectory
from entropy_experiments.cli import app

SECONDS = 30
GIGABYTES = 2
LONGEST_MESSAGE = 4000
MOST_LINES = 25
HALF_WRITTEN = ("*.partial", "*.tmp", "*.part", "tmp*")
SMALL = (
    "batch_config.B_E=5",
    "generation.max_new_tokens=2",
    "approx_delta_h.curvature=false",
    "estimator.eta_sweep=false",
    "detailed_logging.enabled=false",
)
"""The cheapest probe there is."""
DRAWN = ("batch_config.B_U=1", "batch_config.G=2", "batch_config.max_resample_attempts=0")
"""Where its update batch is drawn: without effect on a recorded one, and refused there."""


@dataclass(kw_only=True)
class Box:
    """Where a case lives."""

    folder: Path
    rng: random.Random
    patch: pytest.MonkeyPatch

    @property
    def canary(self) -> Path:
        """What code in a file would create."""
        return self.folder / "canary"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def touch(self) -> str:
        """Python source that creates the canary."""
        return f"open({str(self.canary)!r}, 'w').close()"

    def path(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.path(name)
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        path.write_bytes(data)
        return path

    def module(self, source: str) -> str:
        """A module of the user's that can be imported from the working directory."""
        name = f"users_{self.rng.getrandbits(64):x}"
        self.write(f"{name}.py", source)
        self.patch.syspath_prepend(str(self.folder))
        return name

    def lora(self, *, recorded: bool = False) -> Path:
        """A copy of the embedded adapter checkpoint, with its base."""
        here = embedded_trajectory()
        shutil.copytree(here / "base", self.folder / "run" / "base")
        shutil.copyfile(here / "entropy_probe.json", self.folder / "run" / "entropy_probe.json")
        keep = None if recorded else shutil.ignore_patterns("update_batch")
        shutil.copytree(here / "checkpoint-13", self.checkpoint, ignore=keep)
        return self.checkpoint

    def full(self) -> Path:
        """The embedded base as a full fine-tune, before its first step."""
        import torch

        shutil.copytree(embedded_trajectory() / "base", self.checkpoint)
        shutil.copyfile(
            embedded_trajectory() / "entropy_probe.json", self.folder / "run/entropy_probe.json"
        )
        (self.checkpoint / "trainer_state.json").write_text('{"global_step": 13}')
        torch.save(_fresh_optimizer(), self.checkpoint / "optimizer.pt")
        return self.checkpoint

    @property
    def checkpoint(self) -> Path:
        return self.folder / "run" / "checkpoint-13"

    @property
    def base(self) -> Path:
        return self.folder / "run" / "base"


def probe(box: Box, *more: str, sets: Iterable[str] = (), checkpoint: Path | None = None) -> list:
    """Arguments of the cheapest `run` of the box's checkpoint."""
    where = checkpoint or (box.checkpoint if box.checkpoint.exists() else None)
    named = [] if where is None else ["--checkpoint", str(where)]
    sets = tuple(sets)
    recorded = where is None or (where / "update_batch").exists()
    drawn = DRAWN if not recorded or "update.batch=drawn" in sets else ()
    options = [word for one in (*SMALL, *drawn, *sets) for word in ("--set", one)]
    return ["run", *named, "--out", str(box.out), "--quiet", *options, *more]


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; `...` removes one."""
    content = json.loads(path.read_text())
    for key, value in changes.items():
        if value is ...:
            content.pop(key, None)
        else:
            content[key] = value
    path.write_text(json.dumps(content), encoding="utf-8")


@cache
def _fresh_optimizer() -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(embedded_trajectory() / "base")
    named = dict(model.named_parameters())
    made = torch.optim.AdamW(named.values(), lr=1e-3, weight_decay=0.01)
    return made.state_dict()


@dataclass(frozen=True, kw_only=True)
class Case:
    family: str
    name: str
    make: Callable[[Box], list[str]] = field(repr=False)
    ends: tuple[int, ...] = (0, 2)
    """Exit codes that are right."""
    names: tuple[str, ...] = ()
    """What the message of code 2 must contain: the file, the key."""
    quick: bool = False
    """One of the fixed few of `make test`."""
    usage: bool = False
    """The command line itself is wrong: the message comes with the usage."""

    @property
    def id(self) -> str:
        return f"{self.family}/{self.name}"


class Cases:
    """Those of one family, in the order of the file."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.made: list[Case] = []

    def add(self, name: str, make: Callable[[Box], list[str]], **more: Any) -> None:
        self.made.append(Case(family=self.family, name=name, make=make, **more))

    def seeded(self, count: int, make: Callable[[Box], list[str]], **more: Any) -> None:
        """The same function with other seeds: the box's generator is seeded by the name."""
        for seed in range(count):
            self.add(f"seed {seed}", make, **more)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    code: int
    stdout: str
    stderr: str
    exception: BaseException | None
    seconds: float
    gigabytes: float


class HungError(BaseException):
    """The case did not end in time. Not an Exception: nobody may catch it."""


def ended(case: Case, folder: Path, patch: pytest.MonkeyPatch) -> tuple[Box, Outcome]:
    """Make the input, run the command in this process, see how it ends."""
    box = Box(folder=folder, rng=random.Random(case.id), patch=patch)
    patch.chdir(folder)
    patch.setenv("HF_HUB_OFFLINE", "1")
    from transformers.utils import logging  # whose handler keeps the stderr it is made with

    logging.get_logger()
    arguments = case.make(box)

    def hung(*_: Any) -> None:
        raise HungError(f"{case.id} did not end within {SECONDS} s")

    before, memory = signal.signal(signal.SIGALRM, hung), _peak()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    started = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as a user has them: none is an error
            result = CliRunner().invoke(app, arguments, prog_name="entropy-probe")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.path_importer_cache.pop(str(folder), None)
    odd = result.exception
    return box, Outcome(
        code=result.exit_code,
        stdout=result.stdout,
        stderr=result.stderr,
        exception=None if isinstance(odd, SystemExit) else odd,
        seconds=time.monotonic() - started,
        gigabytes=(_peak() - memory) / 2**20,
    )


def faults_of(case: Case, box: Box, outcome: Outcome) -> list[str]:
    """Everything that is wrong with an ending; nothing if it is as promised."""
    found: list[str] = []
    text = outcome.stdout + outcome.stderr
    if outcome.exception is not None:
        found.append(f"ended with {outcome.exception!r}")
    if "Traceback (most recent call last)" in text:
        found.append("a traceback")
    if outcome.code not in case.ends:
        found.append(f"exit code {outcome.code}; expected {' or '.join(map(str, case.ends))}")
    if outcome.code in (2, 3):
        found += _message_faults(case, outcome)
    if box.canary.exists():
        found.append("code of the input was executed")
    left = [p for pattern in HALF_WRITTEN for p in box.out.rglob(pattern)]
    if left:
        found.append(f"half-written: {left}")
    odd = {c for c in text if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs")}
    if odd:
        found.append(f"control characters {sorted(map(ascii, odd))}")
    if outcome.seconds > SECONDS:
        found.append(f"{outcome.seconds:.0f} s")
    if outcome.gigabytes > GIGABYTES:
        found.append(f"{outcome.gigabytes:.1f} GB more")
    return found


def _message_faults(case: Case, outcome: Outcome) -> list[str]:
    found: list[str] = []
    said = outcome.stderr.strip("\n")
    lines = said.split("\n")
    if case.usage:
        if "Error" not in said:
            found.append("no message")
    elif not said.startswith("Error: ") or any(not line.startswith("  ") for line in lines[1:]):
        found.append("the message is not one sentence, or a list below one")
    if len(lines) > MOST_LINES:
        found.append(f"a message of {len(lines)} lines")
    if len(said) > LONGEST_MESSAGE:
        found.append(f"a message of {len(said)} characters")
    found += [f"the message does not name {name!r}" for name in case.names if name not in said]
    return found


def _peak() -> int:
    """Kilobytes, the most there ever were."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


__all__ = ["Box", "Case", "Cases", "Outcome", "edit_json", "ended", "faults_of", "probe"]
