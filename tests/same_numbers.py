"""Did a change of structure change a number? An older commit and this tree, side by side.

    make same-numbers BASE=6a39016

Every command of `COMMANDS` runs in both trees on one thread of one machine, and everything that
it writes is compared: JSON and JSON lines key by key, arrays, tables and tensors bit by bit. What
a command writes anew is allowed, what it no longer writes is not. Times, versions and places
differ between any two runs and are left out (`NOT_NUMBERS`).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
from safetensors.numpy import load_file

from checkout import ROOT

WORK = ROOT / "build" / "same_numbers"
SMALL = "--set batch_config.B_E=16"
"""The update batch is the recorded one."""
COMMANDS = {
    "run": "run",
    "run_snis": f"run {SMALL} --set importance.is_mode=snis",
    "run_sequence": f"run {SMALL} --set approx_delta_h.normalize=per_sequence "
    "--set detailed_logging.level=debug",
    "run_reverse": f"run {SMALL} --set approx_delta_h.method=reverse",
    "run_fp64": f"run {SMALL} --set precision.runtime_dtype=float64",
    "run_quick": "run --config test_deltaH1",
    "measure": f"measure {SMALL} --set experiment.repeats=2 --set experiment.compute_linquad=true",
    "influence": f"influence {SMALL} --fisher --what-if drop=negative --what-if clip_high=0.28 "
    "--confirm --entropy-budget -0.02",
    "evaluate": "evaluate --prompts 8 --samples 2 --k 1,2",
    "train": "train --steps 4 --set probe.ledger_every=2",
}
NOT_NUMBERS = re.compile(
    r"(^|[._/])(seconds|time|times|timing|timings|elapsed|date|created|started|finished|versions?|"
    r"git|commit|hash|sha256|bytes|path|paths|file|files|folder|directory|out|command|threads|"
    r"line|machine|platform|python|output_dir|logging_dir|run_name|train_runtime|memory|rss|"
    r"[a-z_]*_seconds|[a-z_]*_per_second|[a-z_]*_path|cpu_share|cost|overhead)($|[._\[])"
)
"""Keys whose values differ between two runs of one tree."""
TOLERANCE = 1e-12


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One place where two runs do not agree; `relative` is None where it is not a number."""

    place: str
    before: Any
    now: Any
    relative: float | None = None


def sources(tree: Path) -> str:
    """The import path of a tree, before and after it was cut into packages."""
    packages = sorted((tree / "packages").glob("*/src"))
    return os.pathsep.join(map(str, packages or [tree / "src"]))


def run_command(tree: Path, command: str, out: Path) -> None:
    """Run `entropy-probe` of a tree, on one thread, in a folder of its own."""
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": sources(tree), "OMP_NUM_THREADS": "1"}
    arguments = [*shlex.split(command), "--out", str(out)]
    with (out.parent / f"{out.name}.txt").open("w") as output:
        code = subprocess.run(
            [sys.executable, "-m", "entropy_experiments.cli", *arguments, "--quiet"],
            cwd=out.parent,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if code:
        text = (out.parent / f"{out.name}.txt").read_text()
        sys.exit(f"{' '.join(arguments)} ended with {code} in {tree}:\n{text[-3000:]}")


def numbers(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a JSON value with its place, but for what differs between any two runs."""
    if NOT_NUMBERS.search(place):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from numbers(item, f"{place}[{index}]")
    elif not isinstance(value, str):  # words may be written better
        yield place, value


def contents(file: Path) -> dict[str, Any] | None:
    """The numbers of a file by place; None of a kind that has none."""
    if file.suffix == ".npy":
        return {"array": np.load(file)}
    if file.suffix == ".parquet":
        table = pyarrow.parquet.read_table(file)
        return {name: table[name].to_numpy(zero_copy_only=False) for name in table.column_names}
    if file.suffix == ".safetensors":
        return dict(load_file(file))
    if file.name.endswith(".json.gz"):
        return dict(numbers(json.loads(gzip.decompress(file.read_bytes()))))
    if file.suffix == ".json":
        return dict(numbers(json.loads(file.read_text())))
    if file.suffix == ".jsonl":
        return dict(numbers([json.loads(line) for line in file.read_text().splitlines()]))
    return None


def files(folder: Path) -> dict[str, Path]:
    """Files by name, the date and the time in a log's name left out."""
    found = {}
    for file in sorted(folder.rglob("*")):
        name = re.sub(r"\d{4}-\d\d-\d\d|\d\d-\d\d-\d\d(_\d+)?", "*", str(file.relative_to(folder)))
        if file.is_file() and "/.stages/" not in f"/{name}":
            found[name] = file
    return found


def distance(before: Any, now: Any) -> float | None:
    """The largest relative difference of two values; None where one is not a number."""
    if isinstance(before, np.ndarray) or isinstance(now, np.ndarray):
        one, two = np.asarray(before), np.asarray(now)
        if one.shape != two.shape or one.dtype != two.dtype:
            return math.inf
        if one.dtype.kind not in "fc":
            return 0.0 if np.array_equal(one, two) else math.inf
        if np.array_equal(one, two, equal_nan=True):
            return 0.0
        scale = np.nanmax(np.abs(one)) or 1.0
        return float(np.nanmax(np.abs(one - two)) / scale)
    if before == now:
        return 0.0
    kinds = (bool, type(None))
    if isinstance(before, kinds) or isinstance(now, kinds):
        return None
    return abs(before - now) / max(abs(before), abs(now))


def differences(before: Path, now: Path) -> Iterator[Difference]:
    """Where the files of two runs do not agree."""
    theirs, ours = files(before), files(now)
    for name, file in theirs.items():
        one = contents(file)
        if one is None:
            continue
        if name not in ours:
            yield Difference(place=name, before="a file", now="none")
            continue
        two = contents(ours[name]) or {}
        for place, value in one.items():
            if place not in two:
                yield Difference(place=f"{name}: {place}", before=value, now="absent")
                continue
            relative = distance(value, two[place])
            if relative != 0.0:
                yield Difference(
                    place=f"{name}: {place}", before=value, now=two[place], relative=relative
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base", help="the commit before")
    parser.add_argument("--only", nargs="*", choices=COMMANDS, default=list(COMMANDS))
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", arguments.base],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    tree = WORK / f"tree_{commit}"
    if not tree.exists():
        subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), commit], cwd=ROOT, check=True
        )
    worst = 0.0
    bad = 0
    for name in arguments.only:
        command = COMMANDS[name]
        before = WORK / commit / name
        if not before.exists():  # one commit's numbers serve for many trees
            run_command(tree, command, before)
        now = WORK / "now" / name
        subprocess.run(["rm", "-rf", str(now)], check=True)
        run_command(ROOT, command, now)
        rows = list(differences(before, now))
        for row in rows:
            if row.relative is None or row.relative > TOLERANCE:
                bad += 1
                print(f"  {name}/{row.place}: {str(row.before)[:60]} -> {str(row.now)[:60]}")
            else:
                worst = max(worst, row.relative)
        print(f"{name}: {len(rows)} places differ", flush=True)
    print(f"{bad} beyond {TOLERANCE:g}; the largest difference within it: {worst:.3g}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
