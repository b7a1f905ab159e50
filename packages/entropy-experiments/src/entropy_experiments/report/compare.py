"""Runs side by side: checkpoints along a run, batch sizes, prediction against truth, weights.

    compare([RUN1, RUN2, ...])     a plain dict: `runs`, what `differs`, `validation`, `scaling`

Runs are of one kind (studies, logs, measurements or trajectories) and in one unit. All comes from
`html.data.gather`, as the report of a single run does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from entropy_experiments.config import renamed
from entropy_experiments.report.html.data import gather
from entropy_experiments.report.html.from_log import UNKNOWN_UNIT

KINDS = {
    "probe": "a log",
    "measure": "a measurement",
    "influence": "a study",
    "trajectory": "a trajectory",
    "training": "a training run",
}
NOT_SETTINGS = ("output.", "sampling.save", "sampling.load", "influence.folder")
"""Keys that change no number; the checkpoint is told anyway."""
_MEASURE = tuple(
    f"measure.{name}"
    for name in ("measured", "first_order", "second_order", "repeats", "more_clips")
)
OTHER_COMMANDS = {
    "probe": ("influence.", *_MEASURE),
    "measure": ("influence.",),
    "influence": _MEASURE,
}
"""Settings that a run of this kind does not read."""
NOT_SCALES = ("data.evaluation_prompts", "sampling.seed")
"""Runs that differ in these alone show how errors fall with the batch size."""
OF_LABELS = ("data.", "update.", "checkpoint.", "sampling.", "measure.")


def compare(runs: Sequence[str | Path]) -> dict[str, Any]:
    """Numbers of every run, in the order given."""
    if len(runs) < 2:
        raise ValueError(f"{len(runs)} run to compare; expected two or more.")
    paths = [Path(run) for run in runs]
    twice = [str(p) for i, p in enumerate(paths) if p.resolve() in _resolved(paths[:i])]
    if twice:
        raise ValueError(f"{', '.join(twice)}: given twice. Name each run once.")
    gathered = [gather(path, most_tokens=0) for path in paths]
    first = gathered[0]
    for path, data in zip(paths[1:], gathered[1:]):
        if data["kind"] != first["kind"]:
            raise ValueError(
                f"{paths[0]} is {KINDS[first['kind']]}, {path} is {KINDS[data['kind']]}: their "
                "numbers do not stand for the same. Compare runs of one kind."
            )
        if data["unit"] != first["unit"]:
            raise ValueError(
                f"{paths[0]} is in nats per {first['unit']}, {path} in nats per {data['unit']} "
                "(approx_delta_h.normalize). Compare runs in one unit."
            )
    if first["unit"] == UNKNOWN_UNIT:
        raise ValueError(
            f"{paths[0]} does not say whether it is per token or per sequence, nor do the others. "
            "Put each log's _config.yaml beside it."
        )
    settings = [_settings(data, first["kind"]) for data in gathered]
    differs = _differing(settings)
    labels = _labels(paths, gathered, differs)
    rows = [
        _run(label, path, data) for label, path, data in zip(labels, paths, gathered, strict=True)
    ]
    unlike = _unlike(rows, settings, differs)
    return {
        "kind": first["kind"],
        "unit": first["unit"],
        "runs": rows,
        "differs": differs,
        "validation": _validation(rows),
        "scaling": None if unlike else _scaling(rows),
        "not_scaled": unlike,
    }


def _resolved(paths: Sequence[Path]) -> set[Path]:
    return {path.resolve() for path in paths}


def _run(label: str, path: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    predicted, measured = data["predicted"], data["measured"]
    sizes, gap = data.get("sizes") or {}, data.get("difference")
    if gap is None and predicted is not None and measured is not None:
        gap = {"value": predicted["value"] - measured["value"], "interval": None}
    step = re.search(r"(\d+)$", data["checkpoint"])
    curve = data.get("curve") or {}
    return {
        "label": label,
        "path": str(path),
        "checkpoint": data["checkpoint"],
        "step": int(step[1]) if step else None,
        "learning_rate": data.get("lr"),
        "B_E": sizes.get("B_E"),
        "B_U": sizes.get("B_U"),
        "level": _kept(data["level"]),
        "predicted": _kept(predicted),
        "measured": _kept(measured),
        "fresh": _kept(((data["trajectory"] or {}).get("total") or {}).get("fresh")),
        "difference": _kept(gap),
        "relative_error": _ratio(gap, measured),
        "linear_range": curve.get("linear_range"),
        "noise_floor": curve.get("noise_floor"),
        "weights": _nearest(data.get("weights"), data.get("lr")),
        "trusted": data["verdict"]["trusted"],
        "doubts": data["verdict"]["doubts"],
        "seconds": data.get("seconds"),
    }


def _kept(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {name: found.get(name) for name in ("value", "stderr", "interval", "trusted")}


def _ratio(gap: Mapping[str, Any] | None, measured: Mapping[str, Any] | None) -> float | None:
    if gap is None or measured is None or not measured["value"]:
        return None
    return abs(gap["value"] / measured["value"])


def _nearest(
    weights: Sequence[Mapping[str, Any]] | None, lr: float | None
) -> dict[str, Any] | None:
    """Those of the step size nearest to the step as it was made; their `eta` says which."""
    if not weights or lr is None:
        return None
    return dict(min(weights, key=lambda row: abs(row["eta"] - lr)))


# What was asked differently.


def _settings(data: Mapping[str, Any], kind: str) -> dict[str, Any]:
    text = (data.get("environment") or {}).get("config")
    idle = (*NOT_SETTINGS, *OTHER_COMMANDS.get(kind, ()))
    flat: dict[str, Any] = {}

    def put(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                put(f"{prefix}.{name}" if prefix else str(name), inner)
        elif not prefix.startswith(idle):
            flat[prefix] = value

    put("", renamed(yaml.safe_load(text)) if text else {})
    return flat


def _differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Keys whose values are not the same in all runs, with the value of each run."""
    names = sorted({name for one in settings for name in one})
    found = {name: [one.get(name) for one in settings] for name in names}
    return {name: values for name, values in found.items() if any(v != values[0] for v in values)}


def _labels(
    paths: Sequence[Path], gathered: Sequence[Mapping[str, Any]], differs: Mapping[str, list[Any]]
) -> list[str]:
    """What tells the runs apart, as shortly as can be."""
    checkpoints = [data["checkpoint"] for data in gathered]
    if len(set(checkpoints)) == len(paths):
        return checkpoints
    for name, values in differs.items():
        told = [f"{name.rpartition('.')[2]} {value}" for value in values]
        if name.startswith(OF_LABELS) and len(set(told)) == len(paths):
            return told
    names = [path.name for path in paths]
    return names if len(set(names)) == len(paths) else [str(path) for path in paths]


# What the runs say together.


def _validation(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How far predictions are right; None where nothing was both predicted and measured."""
    both = [row for row in rows if row["predicted"] and row["measured"]]
    if not both:
        return None
    known = [row["difference"] for row in both if row["difference"]["interval"]]
    ends = [(row["predicted"]["value"], row["measured"]) for row in both]
    inside = [low <= p <= high for p, m in ends if m["interval"] for low, high in [m["interval"]]]
    errors = [row["relative_error"] for row in both if row["relative_error"] is not None]
    return {
        "runs": len(both),
        "mean_relative_error": sum(errors) / len(errors) if errors else None,
        "inside_interval": sum(inside) if inside else None,
        "with_interval": len(inside),
        "difference_covers_zero": sum(_covers(gap) for gap in known) if known else None,
        "with_paired_interval": len(known),
        "correlation": _correlation([(p, m["value"]) for p, m in ends]),
    }


def _covers(gap: Mapping[str, Any]) -> bool:
    return gap["interval"][0] <= 0 <= gap["interval"][1]


def _correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    if len(pairs) < 3:
        return None
    x, y = ([pair[i] - sum(p[i] for p in pairs) / len(pairs) for pair in pairs] for i in (0, 1))
    size = math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))
    return sum(a * b for a, b in zip(x, y)) / size if size else None


def _unlike(
    rows: Sequence[Mapping[str, Any]],
    settings: Sequence[Mapping[str, Any]],
    differs: Mapping[str, list[Any]],
) -> str | None:
    """Why standard errors of these runs are not those of one experiment at several sizes."""
    if len({row["B_E"] for row in rows}) < 2:
        return "one batch size"
    if not all(settings):
        return "no power of B_E fitted: a run has no configuration beside it"
    names = [name for name in differs if name not in NOT_SCALES]
    if len({row["checkpoint"] for row in rows}) > 1:
        names.insert(0, "checkpoint")
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"no power of B_E fitted: the runs differ in {', '.join(names[:3])}{more}, too"
    return None


def _scaling(rows: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Powers of B_E by which standard errors fall (-0.5 for independent prompts)."""
    out = {}
    for name in ("predicted", "measured"):
        known = [
            (math.log(row["B_E"]), math.log(row[name]["stderr"]))
            for row in rows
            if row["B_E"] and row[name] and row[name]["stderr"]
        ]
        mean = [sum(pair[i] for pair in known) / len(known) for i in (0, 1)] if known else [0, 0]
        spread = sum((x - mean[0]) ** 2 for x, _ in known)
        if spread > 0:
            out[name] = sum((x - mean[0]) * (y - mean[1]) for x, y in known) / spread
    return out or None
