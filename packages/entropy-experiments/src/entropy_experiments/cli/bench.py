"""`entropy-probe bench`: the repository's benchmarks, and what changed since a stored result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from entropy_experiments.cli.endings import ending
from entropy_experiments.cli.job import as_if_alone
from entropy_experiments.cli.options import AsJson, Debug, Quiet, tell

BENCHMARKS = {
    "scoring": "log-probs and entropies of rollouts, against plain logits; matmul peak",
    "estimators": "prediction and measurement in forward passes; influences, directions",
    "settings": "several settings of adapters in one pass, against a pass for each",
    "profile": "where the time of a pass, a prediction and a measurement goes",
    "growth": "time and memory over rollouts, lengths, vocabulary and rank",
    "ranks": "two processes against one (needs two idle cores)",
    "influence": "all influences, against one backward and one pass for each",
    "entropy": "token entropies at a large vocabulary, against log_softmax",
    "variance": "variance of the estimators' forms over the length of responses",
    "coverage": "how often the 95 % intervals of a run hold the truth",
    "online": "what the probe costs a training (minutes; needs SmolLM2)",
    "doctor": "what the gradient doctor costs a training step",
}
USUAL = ("scoring", "influence", "entropy")
EXAMPLES = (
    "\b\nExamples:\n"
    "  entropy-probe bench                      " + ", ".join(USUAL) + "\n"
    "  entropy-probe bench scoring --compare docs/benchmarks\n\n"
    "\b\nBenchmarks:\n" + "\n".join(f"  {name:<10} {what}" for name, what in BENCHMARKS.items())
)


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Which; see below.", show_default=False),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            "--compare", metavar="DIR_OR_JSON", help="Stored result to set the new one beside."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the results go.")] = Path(
        "build/benchmarks"
    ),
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure speed and memory against plainly written implementations, in one process each."""
    with ending(debug=debug):
        asked = list(names or USUAL)
        unknown = [name for name in asked if name not in BENCHMARKS]
        if unknown:
            raise ValueError(
                f"No benchmark {', '.join(unknown)}; expected some of {', '.join(BENCHMARKS)}."
            )
        home = _repository()
        before = {name: _stored(compare, name) for name in asked} if compare is not None else {}
        out.mkdir(parents=True, exist_ok=True)
        found = {name: _run(name, home, out, quiet=quiet or as_json) for name in asked}
        lines: list[str] = []
        for name in asked:
            lines.append(f"{name}: {out / f'{name}.json'}")
            if compare is not None:
                lines += changes(before[name], found[name])
        tell(found, lambda: lines, as_json=as_json)


def _repository() -> Path:
    """Benchmarks are no part of the installed package: they need its source beside them."""
    places = (Path.cwd(), Path(__file__).parents[3])
    for place in places:
        if (place / "benchmarks" / "scoring.py").is_file():
            return place
    raise FileNotFoundError(
        "No benchmarks/ here; expected the repository of entropy-experiments. Call this from its "
        "folder."
    )


def _run(name: str, home: Path, out: Path, *, quiet: bool) -> Any:
    path = (out / f"{name}.json").resolve()
    words = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(path)]
    aside = subprocess.DEVNULL if quiet else None
    done = subprocess.run(words, cwd=home, env=as_if_alone(), stdout=aside)
    if done.returncode != 0:
        raise RuntimeError(
            f"The benchmark {name} ended with code {done.returncode}; its own message says why."
        )
    return json.loads(path.read_text(encoding="utf-8"))


def _stored(compare: Path, name: str) -> Any:
    path = compare / f"{name}.json" if compare.is_dir() else compare
    if not path.is_file():
        raise FileNotFoundError(
            f"No {path}; expected a result of an earlier `entropy-probe bench`."
        )
    return json.loads(path.read_text(encoding="utf-8"))


def changes(before: Any, after: Any) -> list[str]:
    """Numbers that both results have, where they differ; ratios are what to look at.

    Of a median with its range over rounds it is said whether the two ranges overlap: a change
    inside them may be the machine's mood.
    """
    old, new = dict(_numbers(before)), dict(_numbers(after))
    ranges = [dict(_ranges(found)) for found in (before, after)]
    rows = [
        (name, old[name], value)
        for name, value in new.items()
        if name in old and value != old[name]
    ]
    wide = max((len(name) for name, *_ in rows), default=0)
    return [
        f"  {name:<{wide}}  {was:>12.4g}  {value:>12.4g}  "
        + (f"{value / was - 1:+8.1%}" if was else "")
        + _overlap(*(found.get(name) for found in ranges))
        for name, was, value in rows
    ]


def _overlap(before: tuple[float, float] | None, after: tuple[float, float] | None) -> str:
    if before is None or after is None:
        return ""
    together = before[0] <= after[1] and after[0] <= before[1]
    return "  ranges overlap" if together else "  ranges apart"


def _parts(found: Any, place: str) -> list[tuple[str, Any]]:
    """What is inside, by name. A list of numbers is single rounds, or a range."""
    if isinstance(found, dict):
        named = found.items()
    elif isinstance(found, list) and all(isinstance(one, dict) for one in found):
        named = enumerate(found)
    else:
        return []
    return [(f"{place}.{key}" if place else str(key), value) for key, value in named]


def _numbers(found: Any, place: str = "") -> list[tuple[str, float]]:
    if isinstance(found, int | float) and not isinstance(found, bool):
        return [(place, found)]
    return [pair for name, value in _parts(found, place) for pair in _numbers(value, name)]


def _ranges(found: Any, place: str = "") -> list[tuple[str, tuple[float, float]]]:
    """Of every median that has one beside it, under the median's name."""
    out = [pair for name, value in _parts(found, place) for pair in _ranges(value, name)]
    if isinstance(found, dict) and {"median", "range"} <= found.keys():
        low, high = found["range"]
        out.append((f"{place}.median" if place else "median", (low, high)))
    return out
