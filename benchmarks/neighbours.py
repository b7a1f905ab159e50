"""Every command beside busy neighbours, against the same on a quiet machine.

    python -m benchmarks.neighbours [--json FILE] [--rounds 2] [--commands run train] [--smallest]

Neighbours are processes of our own that multiply small matrices without end, one core each. Each
round runs every command alone, beside one and beside two, and once more alone with `--threads` set
to all cores, as torch does by itself: what choosing the number costs where nobody disturbs. The
four come in turn, command by command, the order turning from round to round, so that a slow minute
hits all of them. Wall-clock seconds of the whole process, imports included, as a user waits for it.

    times    median over rounds, over the quiet machine's; at most 2.5 beside one, 4 beside two
    choice   quiet, threads chosen, over quiet, all cores, minus 1, in the same round; the median:
             at most 5 %

Two rounds of all five commands take about ten minutes on two cores. Run it with nothing else on the
machine. `--smallest`: sizes that show that it works, and nothing else.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.tables import conditions, write

BUSY = """
import os
import numpy as np
parent, a = os.getppid(), np.ones((64, 64))
while os.getppid() == parent:  # not longer than the benchmark
    for _ in range(1000):
        a @ a
"""
COMMANDS = ("run", "measure", "influence", "evaluate", "train")
PATIENCE = 900.0
"""Seconds for one command: fifty times as slow is a result, too, but nobody waits for it."""
LIMITS = {"one": 2.5, "two": 4.0, "choice": 0.05}


@dataclass(frozen=True)
class Condition:
    neighbours: int = 0
    all_cores: bool = False


CONDITIONS = {
    "quiet": Condition(),
    "all_cores": Condition(all_cores=True),
    "one": Condition(neighbours=1),
    "two": Condition(neighbours=2),
}


def words_of(command: str, *, smallest: bool) -> list[str]:
    """Small enough for minutes, large enough that threads matter beside the imports."""
    settings: dict[str, Any]
    if command == "evaluate":
        return ["evaluate", "--prompts", "5" if smallest else "24"]
    if command == "train":
        settings = {"buffer_size": 8, "microbatch_size": 8, "doctor.mode": "light"}
        steps = 1
        if smallest:
            settings |= {"buffer_size": 2, "microbatch_size": 2, "max_completion_length": 4}
            settings |= {"eval_prompts": 5, "probe.prompts": 5}
        else:
            settings |= {"probe.prompts": 16}
            steps = 6
        return ["train", "--steps", str(steps), *_set(settings)]
    settings = {"data.evaluation_prompts": 8 if smallest else 32}
    if smallest:
        settings |= {"sampling.max_new_tokens": 8}
    if command == "influence":
        settings |= {"influence.measured_rollouts": 2}
    return [command, *_set(settings)]


def _set(settings: dict[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    busy = [subprocess.Popen([sys.executable, "-c", BUSY], env=environment) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def seconds(words: list[str], condition: Condition) -> float:
    """Of one command in a process of its own; a command that fails ends the benchmark."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    threads = ["--threads", str(os.cpu_count())] if condition.all_cores else []
    with TemporaryDirectory() as folder, neighbours(condition.neighbours):
        out = ["--out", str(Path(folder) / "out")]
        command = [sys.executable, "-m", "entropy_experiments.cli", *words, *out, *threads]
        start = time.perf_counter()
        try:
            done = subprocess.run(
                [*command, "--quiet"],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{' '.join(words)} had not ended after {PATIENCE:.0f} s") from None
        took = time.perf_counter() - start
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return took


def row_of(command: str, timings: dict[str, list[float]]) -> dict[str, Any]:
    quiet = median(timings["quiet"])
    pairs = zip(timings["quiet"], timings["all_cores"], strict=True)
    return {
        "command": command,
        **{name: round(median(values), 2) for name, values in timings.items()},
        "times_one": round(median(timings["one"]) / quiet, 3),
        "times_two": round(median(timings["two"]) / quiet, 3),
        "choice": round(median(chosen / fixed - 1 for chosen, fixed in pairs), 4),
        "seconds": timings,
    }


def line_of(row: dict[str, Any]) -> str:
    return (
        f"{row['command']:10s} quiet {row['quiet']:6.1f}  one {row['one']:6.1f} "
        f"({row['times_one']:.2f} times)  two {row['two']:6.1f} ({row['times_two']:.2f})  "
        f"all cores {row['all_cores']:6.1f}, choosing {row['choice']:+.1%}"
    )


def faults(rows: list[dict[str, Any]]) -> list[str]:
    limits = {"times_one": LIMITS["one"], "times_two": LIMITS["two"], "choice": LIMITS["choice"]}
    return [
        f"{row['command']}: {name} is {row[name]:.3g}, expected at most {limit:g}"
        for row in rows
        for name, limit in limits.items()
        if row[name] > limit
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Every command beside busy neighbours.")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--smallest", action="store_true", help="Show that it works; no result.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load, begun = os.getloadavg()[0], time.perf_counter()
    if load > 0.5 and not options.smallest:
        print(f"load is {load:.1f}: something else runs here, and these seconds are worth little")
    timings: dict[str, dict[str, list[float]]] = {
        command: {name: [] for name in CONDITIONS} for command in options.commands
    }
    for number in range(options.rounds):
        names = list(CONDITIONS)
        for command in options.commands:
            words = words_of(command, smallest=options.smallest)
            for name in names[number % 4 :] + names[: number % 4]:
                timings[command][name].append(seconds(words, CONDITIONS[name]))
    rows = [row_of(command, by_name) for command, by_name in timings.items()]
    for row in rows:
        print(line_of(row))
    print(f"{time.perf_counter() - begun:.0f} s in all")
    for fault in faults(rows):
        print(fault)
    if options.json is not None:
        table = conditions(options.rounds, smallest=options.smallest, rows=rows)
        write(options.json, {**table, "load": load})


if __name__ == "__main__":
    main()
