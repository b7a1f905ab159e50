"""The file that `entropy-probe measure` writes: read again, and told in words. Without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = "entropy_experiments.measurements"
SCHEMA = 1
NAME = "results.json"
AGAIN = "Run `entropy-probe measure` again: finished repeats are kept."


def measurements_file(run: Path) -> Path | None:
    """The file of a folder that `measure --out` wrote, or the file itself; None: no such file."""
    path = run / NAME if run.is_dir() else run
    if not path.is_file() or path.suffix != ".json":
        return None
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        if run.is_dir():
            raise ValueError(f"{path} is not JSON ({error}). {AGAIN}") from error
        return None  # whoever reads it as something else says what is wrong with it
    return path if isinstance(found, dict) and found.get("format") == FORMAT else None


def read_measurements(path: str | Path) -> dict[str, Any]:
    path = Path(path)
    found = json.loads(path.read_bytes())
    if found.get("format") != FORMAT or found.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has format {found.get('format')!r}, schema {found.get('schema')!r}; expected "
            f"{FORMAT!r}, {SCHEMA}. {AGAIN}"
        )
    return found


def measurement_report(results: Mapping[str, Any]) -> list[str]:
    """The summary as lines of text."""
    repeats, plan = results["repeats"], results["plan"]
    count = len(repeats)
    lines = [
        f"Entropy change of the update after {results['checkpoint']} ({repeats[0]['update']}), in "
        f"nats per {results['unit']}, over {count} repeat{'s' if count > 1 else ''} of "
        f"{repeats[0]['B_E']} prompts:"
    ]
    for entry in results["summary"]:
        times = entry["eta"] / results["learning_rate"]
        lines.append(f"  eta {entry['eta']:g} ({times:g} x the learning rate)")
        lines += [
            f"    {name:9s}{_shown(entry[name])}{_untrusted(entry[name])}"
            for name in ("measured", "linear", "linquad")
            if name in entry
        ]
        lines += [
            f"    {name} - measured{_shown(found)}, paired"
            for name, found in entry["differences"].items()
        ]
        lines += [
            f"    measured, clip {clip}{_shown(found)}" for clip, found in entry["clips"].items()
        ]
    if count == 1 and plan["repeats"] == 1:
        lines.append("One repeat: intervals are over its prompts. experiment.repeats draws more.")
    lines.append(f"Saved: {results['results_path']}")
    return lines


def _shown(found: Mapping[str, Any]) -> str:
    if found["interval"] is None:
        return f" {found['mean']:+.4g} (no interval)"
    low, high = found["interval"]
    return f" {found['mean']:+.4g} (95% {low:+.3g} to {high:+.3g})"


def _untrusted(found: Mapping[str, Any]) -> str:
    doubtful = found["repeats"] - found["trusted"]
    return f"  not trusted in {doubtful} of {found['repeats']}" if doubtful else ""
