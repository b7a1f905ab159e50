"""Drawings of the stored results for docs/benchmarks.md.

    python -m benchmarks.plots [--results docs/benchmarks] [--out docs/images]

    benchmarks_ratios.svg   how many times faster than each plain way, median and range, and targets
    benchmarks_growth.svg   CPU time over each size, on logarithmic axes, with the fitted exponents

A result that is not stored is left out, and that is said. Drawings are the same bytes for the same
results.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks.summary import stored
from benchmarks.tables import STORED

IMAGES = STORED.parent / "images"
COLOURS = {
    "pass": "#4c72b0",
    "prediction": "#dd8452",
    "measurement": "#55a868",
    "tokens": "#8172b3",
}
NAMES = {"smollm2": "SmolLM2-135M", "random": "30M, random"}
AXES = {
    "N_E": "evaluation rollouts",
    "N_U": "update rollouts",
    "S": "response tokens",
    "V": "vocabulary",
    "r": "rank of LoRA",
}


def ratios(results: Mapping[str, Any]) -> list[tuple[str, dict[str, Any], float | None]]:
    """(label, median and range, target), from the files that there are."""
    out = []
    for model, found in _models(results, "scoring"):
        targets = results["scoring"].get("targets", {})
        for part, times in found.items():
            if not part.startswith("threads_"):
                continue
            for way, ratio in times["speedup"].items():
                label = f"{NAMES[model]}: scoring, {way.replace('_', ' by ')}, {part[8:]} thr."
                out.append((label, ratio, targets.get(way)))
    for model, found in _models(results, "estimators"):
        targets = results["estimators"].get("targets", {})
        for way in "bcd":
            if way in found:
                out.append((f"{NAMES[model]}: ({way})", found[way], targets.get(way)))
    if "ranks" in results:
        found = results["ranks"]
        out.append(("two ranks over one", found["speedup"], found["targets"]["speedup"]))
    return out


def _models(results: Mapping[str, Any], name: str) -> Sequence[tuple[str, Any]]:
    """Of a result in the present form; older ones have no ranges to draw."""
    found = results.get(name, {})
    return list(found.get("models", {}).items()) if "targets" in found else []


def draw_ratios(results: Mapping[str, Any]) -> Figure | None:
    rows = ratios(results)
    if not rows:
        return None
    figure = Figure(figsize=(8, 0.8 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for y, (_, found, target) in enumerate(rows):
        axes.plot(found["range"], [y, y], color="#4c72b0", linewidth=4, alpha=0.4)
        axes.plot([found["median"]], [y], "o", color="#4c72b0")
        if target is not None:
            axes.plot([target], [y], "|", color="#c44e52", markersize=14, markeredgewidth=2)
    axes.set_yticks(range(len(rows)), [label for label, *_ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1.0, color="#999999", linewidth=0.8)
    axes.set_xlabel("times as fast (dot: median, bar: range over rounds, red: target)")
    return figure


def draw_growth(results: Mapping[str, Any]) -> Figure | None:
    found = results.get("growth", {}).get("axes", {})
    shown = [axis for axis in AXES if axis in found]
    if not shown:
        return None
    figure = Figure(figsize=(2.7 * len(shown), 3.2), layout="constrained")
    for axes, axis in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for way, one in found[axis].items():
            sizes = [int(size) for size in one["cpu_seconds"]]
            each = list(one["cpu_seconds"].values())
            label = f"{way} {one['exponent']['median']:.2f}"
            axes.plot(
                sizes, [x["median"] for x in each], "o-", ms=3, color=COLOURS[way], label=label
            )
            low, high = zip(*(x["range"] for x in each), strict=True)
            axes.fill_between(sizes, low, high, color=COLOURS[way], alpha=0.2, linewidth=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        sizes = sorted({int(size) for one in found[axis].values() for size in one["cpu_seconds"]})
        axes.set_xticks(sizes, [_short(size) for size in sizes], fontsize=8)
        axes.xaxis.set_minor_formatter(NullFormatter())
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.5)  # room for the legend
        axes.set_xlabel(AXES[axis])
        axes.legend(fontsize=7, title="exponent", title_fontsize=7, loc="upper left")
    figure.axes[0].set_ylabel("CPU seconds")
    return figure


def _short(size: int) -> str:
    return f"{size // 1024}k" if size >= 4096 else str(size)


DRAWINGS = {"benchmarks_ratios": draw_ratios, "benchmarks_growth": draw_growth}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=STORED)
    parser.add_argument("--out", type=Path, default=IMAGES)
    asked = parser.parse_args(argv)
    results = stored(asked.results)
    asked.out.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": "benchmarks", "svg.fonttype": "none"}):
        for name, draw in DRAWINGS.items():
            figure = draw(results)
            if figure is None:
                print(f"{name}: its results are not stored yet; not drawn")
                continue
            path = asked.out / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            print(path)


if __name__ == "__main__":
    main()
