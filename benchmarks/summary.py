"""The stored results beside their targets, as the table in docs/benchmarks.md.

    python -m benchmarks.summary

reads docs/benchmarks/*.json and writes the part of docs/benchmarks.md between its two marks: the
table, the profiles, and the drawings that benchmarks.plots has made. What is not in a file is
*not stored yet*; nothing is written there by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from benchmarks.tables import STORED, told

PAGE = STORED.parent / "benchmarks.md"
MARKS = ("<!-- made by python -m benchmarks.summary -->", "<!-- end -->")
MISSING = "not stored yet"
LARGEST = 8
"""Operators of a profile that the page shows."""
DRAWN = {
    "benchmarks_ratios": "How many times faster than each plain way",
    "benchmarks_growth": "CPU time over each size",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number: where it is, and what it should be."""

    what: str
    file: str
    at: tuple[str, ...]
    target: float | None = None
    better: Literal["higher", "lower"] = "higher"
    percent: bool = False


def _scoring(model: str, label: str) -> list[Row]:
    def row(what: str, *at: str, **more: Any) -> Row:
        return Row(what=f"{label}: {what}", file="scoring", at=("models", model, *at), **more)

    out = []
    for threads, how in ((1, "one thread, CPU time"), (2, "two threads, wall clock")):
        part = f"threads_{threads}"
        for way, said in (("plain_8", "batches of 8"), ("plain_1", "batches of 1")):
            out.append(
                row(f"scoring, times faster than {said}, {how}", part, "speedup", way, target=3.0)
            )
        out.append(row(f"scoring, share of the matmul peak, {how}", part, "of_peak", target=0.75))
    memory = {"target": 0.25, "better": "lower"}
    return [*out, row("scoring, memory over that of batches of 8", "memory", **memory)]


def _estimators(model: str, label: str) -> list[Row]:
    def row(what: str, *at: str, **more: Any) -> Row:
        return Row(what=f"{label}: {what}", file="estimators", at=("models", model, *at), **more)

    return [
        row(
            "prediction with stderr, in passes",
            "in_passes",
            "prediction",
            target=3.5,
            better="lower",
        ),
        row(
            "measurement, in passes per eta",
            "in_passes",
            "measurement",
            target=1.1,
            better="lower",
        ),
        row("token influences, times faster than one gradient per rollout (b)", "b", target=4.0),
        row("32 rollouts x 3 etas, times faster than one pass each (c)", "c", target=30.0),
        row("4 directions at once, times faster than one jvp each (d)", "d"),
    ]


def _growth() -> list[Row]:
    out = []
    for axis, way in (
        ("N_E", "pass"),
        ("N_E", "prediction"),
        ("N_E", "measurement"),
        ("N_E", "tokens"),
        ("N_U", "tokens"),
        *((axis, way) for axis in "SVr" for way in ("pass", "prediction", "tokens")),
    ):
        limit = 1.1 if axis in ("N_E", "N_U") else None
        place = ("axes", axis, way, "exponent")
        what = f"30M: exponent of {way} over {axis}"
        out.append(Row(what=what, file="growth", at=place, target=limit, better="lower"))
        if limit is not None:  # constant costs hide growth in a fit over all sizes
            ends = ("axes", axis, way, "last")
            out.append(Row(what=f"{what}, two largest sizes alone", file="growth", at=ends))
    for way in ("pass", "prediction", "measurement", "tokens"):
        for kind in ("working", "all"):
            out.append(
                Row(
                    what=f"30M: {way}, {kind} memory, growth from N_E = 128 to 2048",
                    file="growth",
                    at=("memory", way, "growth", kind),
                    target=0.05,
                    better="lower",
                    percent=True,
                )
            )
    return out


def _online(responses: int) -> list[Row]:
    said = f"SmolLM2: probe at every 5th of steps of {responses} responses"
    return [
        Row(
            what=f"{said}, {what}",
            file="online",
            at=("batches", str(responses), "overhead", kind),
            target=limit,
            better="lower",
            percent=True,
        )
        for kind, what, limit in (
            ("inside", "of training's CPU time, from inside", 0.10),
            ("time", "more CPU time than without it, from outside", 0.10),
            ("memory", "more peak memory", 0.15),
        )
    ]


ROWS: Sequence[Row] = (
    *_scoring("smollm2", "SmolLM2"),
    *_scoring("random", "30M"),
    *_estimators("smollm2", "SmolLM2"),
    *_estimators("random", "30M"),
    *_growth(),
    Row(what="two ranks of one thread over one", file="ranks", at=("speedup",), target=1.6),
    *_online(64),
    *_online(32),
)


def stored(folder: Path = STORED) -> dict[str, Any]:
    return {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
    }


def lines(results: Mapping[str, Any]) -> list[str]:
    out = ["| what | target | measured: median (range) | met |", "|---|---|---|---|"]
    for row in ROWS:
        found = _at(results.get(row.file), row.at)
        sign = ">=" if row.better == "higher" else "<="
        target = "" if row.target is None else f"{sign} {_said(row.target, row.percent)}"
        out.append(f"| {row.what} | {target} | {_measured(found, row)} | {met(found, row)} |")
    return out


def met(found: Any, row: Row) -> str:
    """By the median."""
    if found is None or row.target is None:
        return ""
    value = found["median"] if isinstance(found, dict) else found
    good = value >= row.target if row.better == "higher" else value <= row.target
    return "yes" if good else "no"


def _measured(found: Any, row: Row) -> str:
    if found is None:
        return MISSING
    return told(found) if isinstance(found, dict) else _said(found, row.percent)


def _said(value: float, percent: bool) -> str:
    return f"{100 * value:.3g} %" if percent else f"{value:.3g}"


def _at(found: Any, place: Sequence[str]) -> Any:
    for name in place:
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return found


def profiles(results: Mapping[str, Any]) -> list[str]:
    """For each model and way the operators that take most of the time."""
    out = []
    for model, label in (("smollm2", "SmolLM2"), ("random", "30M")):
        ways = _at(results.get("profile"), ("models", model)) or {}
        if ways:
            out += ["", f"| {label}: operators by their own CPU time, one thread | |", "|---|---|"]
        for way, rows in ways.items():
            largest = islice(rows.items(), LARGEST)
            shares = ", ".join(f"{operator} {row['share']:.1%}" for operator, row in largest)
            out.append(f"| {way} | {shares} |")
    return out


def drawings(folder: Path) -> list[str]:
    return [
        line
        for name, said in DRAWN.items()
        if (folder / f"{name}.svg").is_file()
        for line in ("", f"![{said}](images/{name}.svg)")
    ]


def page(text: str, results: Mapping[str, Any], images: Path = STORED.parent / "images") -> str:
    """The page with its table made anew."""
    begin, end = MARKS
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"The page has no single part between {begin!r} and {end!r}; put it back.")
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return "\n".join(
        [
            f"{before}{begin}",
            "",
            *lines(results),
            *profiles(results),
            *drawings(images),
            "",
            f"{end}{after}",
        ]
    )


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), stored()), encoding="utf-8")


if __name__ == "__main__":
    main()
