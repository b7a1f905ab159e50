"""Every command beside busy neighbours, against the same on a quiet machine.

    python -m benchmarks.neighbours [--json FILE] [--rounds 3]

Neighbours are processes of our own that multiply small matrices without end, one core each. Each
round runs every command alone, beside one and beside two; medians over rounds, and their ratios to
the quiet machine. `--threads all` takes the choice of threads away (every core, always): what it is
worth. Run it with nothing else on the machine, and with OMP_NUM_THREADS unset.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

BUSY = "import numpy as np\na = np.ones((64, 64))\nwhile True: a @ a"
SMALL = ["--set", "batch_config.B_E=32"]
COMMANDS = {
    "run": ["run", *SMALL],
    "influence": ["influence", *SMALL],
    "measure": ["measure", *SMALL],
    "evaluate": ["evaluate", "--prompts", "16"],
    "train": ["train", "--steps", "4"],
}
NEIGHBOURS = (0, 1, 2)


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


def seconds(words: list[str], threads: str) -> float:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    if threads == "all":
        environment["OMP_NUM_THREADS"] = str(os.cpu_count())
    with TemporaryDirectory() as folder:
        out = ["--out", str(Path(folder) / "out")]
        command = [sys.executable, "-m", "entropy_experiments.cli", *words, *out, "--quiet"]
        start = time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        took = time.perf_counter() - start
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description="Every command beside busy neighbours.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", choices=("chosen", "all"), default="chosen")
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[int, list[float]]] = {
        name: {count: [] for count in NEIGHBOURS} for name in options.commands
    }
    for _ in range(options.rounds):
        for count in NEIGHBOURS:
            with neighbours(count):
                for name in options.commands:
                    found[name][count].append(seconds(COMMANDS[name], options.threads))
    rows = []
    print(f"threads: {options.threads}; seconds, and times the quiet machine")
    for name, by_count in found.items():
        quiet, one, two = (median(by_count[count]) for count in NEIGHBOURS)
        times = f"{one / quiet:.2f} {two / quiet:.2f}"
        print(f"{name:10s} quiet {quiet:6.1f}  one {one:6.1f}  two {two:6.1f}  times {times}")
        rows.append({"command": name, "quiet": quiet, "one": one, "two": two})
    if options.json is not None:
        table = {"threads": options.threads, "rounds": options.rounds, "rows": rows}
        options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
