"""What the speed benchmarks share: their options, rounds that alternate, medians with their spread.

Ways are timed in turn, the order turning from round to round, so that a noisy moment hits all. A
ratio is taken within a round, and the median over rounds is given beside the smallest and largest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

STORED = Path(__file__).parents[1] / "docs" / "benchmarks"
MODELS = ("smollm2", "random")
Clock = Callable[[], float]


def options(doc: str | None, name: str, *, rounds: int | None = 5, models: bool = True) -> Any:
    """The parser that every program begins with; results go to docs/benchmarks/NAME.json."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    if models:
        parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path, default=STORED / f"{name}.json")
    return parser


def conditions(rounds: int, **more: Any) -> dict[str, Any]:
    """What a result was made under. A load well above the threads in use spoils wall clocks."""
    return {
        "rounds": rounds,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load": list(os.getloadavg()),
        **more,
    }


def write(path: Path, found: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def seconds(run: Callable[[], Any], clock: Clock = time.process_time) -> float:
    """CPU time unless another clock is given: of all threads, and of this process alone."""
    began = clock()
    run()
    return clock() - began


def alternately(
    ways: Mapping[str, Callable[[], Any]], rounds: int, clock: Clock = time.process_time
) -> dict[str, list[float]]:
    """Seconds of every way, in every round."""
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; expected at least 1.")
    found: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds):
        for name in list(ways) if i % 2 else list(ways)[::-1]:
            found[name].append(seconds(ways[name], clock))
    return found


def spread(values: Iterable[float]) -> dict[str, Any]:
    kept = sorted(values)
    return {"median": statistics.median(kept), "range": [kept[0], kept[-1]]}


def ratio(above: Sequence[float], below: Sequence[float], scale: float = 1.0) -> dict[str, Any]:
    """Of times of the same rounds."""
    return spread(scale * a / b for a, b in zip(above, below, strict=True))


def told(found: Mapping[str, Any], digits: int = 2) -> str:
    """`3.37 (3.05 to 3.81)`"""
    low, high = found["range"]
    return f"{found['median']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
