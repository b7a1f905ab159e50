"""`entropy-probe bench`: the repository's benchmarks, and what changed since a stored result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from entropy_experiments.cli.endings import ending
from entropy_experiments.cli.options import AsJson, Debug, Quiet, tell

BENCHMARKS = {
    "scoring": "log-probs and entropies of rollouts, against plain logits",
    "estimators": "prediction and measurement in forward passes, influences",
    "influence": "all influences, against one backward and one pass for each",
    "entropy": "token entropies at a large vocabulary, against log_softmax",
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
    done = subprocess.run(words, cwd=home, stdout=subprocess.DEVNULL if quiet else None)
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
    """Numbers that both results have, where they differ; ratios are what to look at."""
    old, new = dict(_numbers(before)), dict(_numbers(after))
    rows = [
        (name, old[name], value)
        for name, value in new.items()
        if name in old and value != old[name]
    ]
    wide = max((len(name) for name, *_ in rows), default=0)
    return [
        f"  {name:<{wide}}  {was:>12.4g}  {value:>12.4g}  "
        + (f"{value / was - 1:+8.1%}" if was else "")
        for name, was, value in rows
    ]


def _numbers(found: Any, place: str = "") -> list[tuple[str, float]]:
    if isinstance(found, bool):
        return []
    if isinstance(found, int | float):
        return [(place, found)]
    if isinstance(found, dict):
        parts = ((f"{place}.{key}" if place else str(key), value) for key, value in found.items())
        return [pair for name, value in parts for pair in _numbers(value, name)]
    return []  # lists are single rounds
