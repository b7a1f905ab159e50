"""Runs side by side: checkpoints along a run, batch sizes, prediction against truth, weights.

    compare([RUN1, RUN2, ...])     `runs`, what `differs`, `validation`, `scaling`
    tables(compared)               the same as tables of text

Runs are of one kind (studies, logs, measurements or trajectories) and in one unit. All comes from
`html.data.gather`, as the report of a single run does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import yaml

from entropy_experiments.config import renamed
from entropy_experiments.report import words
from entropy_experiments.report.html.data import gather
from entropy_experiments.report.html.from_log import UNKNOWN_UNIT
from entropy_experiments.report.sections import ReportData, RunKind, WeightsRow, as_number
from entropy_experiments.results import AnyNumber, JSONObject

KINDS = {
    "probe": "a log",
    "measure": "a measurement",
    "influence": "a study",
    "trajectory": "a trajectory",
    "training": "a training run",
}
NOT_SETTINGS = ("output.", "sampling.save", "sampling.load", "influence.folder")
"""Keys that change no number; the checkpoint is shown anyway."""
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
PAIR: tuple[Literal["predicted"], Literal["measured"]] = ("predicted", "measured")
OF_LABELS = ("data.", "update.", "checkpoint.", "sampling.", "measure.")


class ComparedNumber(TypedDict):
    value: float
    stderr: float | None
    interval: list[float] | None
    trusted: bool | None


class ComparedRun(TypedDict):
    """One run of a comparison."""

    label: str
    path: str
    checkpoint: str
    step: int | None
    learning_rate: float | None
    B_E: int | None
    B_U: int | None
    level: ComparedNumber | None
    predicted: ComparedNumber | None
    measured: ComparedNumber | None
    fresh: ComparedNumber | None
    difference: ComparedNumber | None
    relative_error: float | None
    linear_range: float | None
    noise_floor: float | None
    weights: WeightsRow | None
    trusted: bool | None
    doubts: list[str]
    seconds: float | None


class Validation(TypedDict):
    """How far predictions are right."""

    runs: int
    mean_relative_error: float | None
    inside_interval: int | None
    with_interval: int
    difference_covers_zero: int | None
    with_paired_interval: int
    correlation: float | None


class Comparison(TypedDict):
    """What `compare` returns, and `entropy-probe report RUN RUN --json` prints."""

    kind: RunKind
    unit: str
    runs: list[ComparedRun]
    differs: dict[str, list[Any]]
    validation: Validation | None
    scaling: dict[str, float] | None
    not_scaled: str | None
    html: NotRequired[str]
    """Where the page is, if one was written."""


def compare(runs: Sequence[str | Path]) -> Comparison:
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
                "(entropy.unit). Compare runs in one unit."
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


def _run(label: str, path: Path, data: ReportData) -> ComparedRun:
    predicted, measured = data["predicted"], data["measured"]
    sizes, gap = data.get("sizes") or {}, data.get("difference")
    run = data.get("trajectory")
    if gap is None and predicted is not None and measured is not None:
        gap = as_number(predicted["value"] - measured["value"])
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
        "fresh": _kept(None if run is None else run["total"]["fresh"]),
        "difference": _kept(gap),
        "relative_error": _ratio(gap, measured),
        "linear_range": curve.get("linear_range"),
        "noise_floor": curve.get("noise_floor"),
        "weights": _nearest(data.get("weights"), data.get("lr")),
        "trusted": data["verdict"]["trusted"],
        "doubts": data["verdict"]["doubts"],
        "seconds": data.get("seconds"),
    }


def _kept(number: AnyNumber | None) -> ComparedNumber | None:
    if number is None:
        return None
    return {
        "value": number["value"],
        "stderr": number.get("stderr"),
        "interval": number.get("interval"),
        "trusted": number.get("trusted"),
    }


def _ratio(gap: AnyNumber | None, measured: AnyNumber | None) -> float | None:
    if gap is None or measured is None or not measured["value"]:
        return None
    return abs(gap["value"] / measured["value"])


def _nearest(weights: Sequence[WeightsRow] | None, lr: float | None) -> WeightsRow | None:
    """Those of the step size nearest to the step as it was made; their `eta` says which."""
    if not weights or lr is None:
        return None
    return min(weights, key=lambda row: abs(row["eta"] - lr))


# What was asked differently.


def _settings(data: ReportData, kind: str) -> JSONObject:
    text = (data.get("environment") or {}).get("config")
    idle = (*NOT_SETTINGS, *OTHER_COMMANDS.get(kind, ()))
    flat: JSONObject = {}

    def put(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                put(f"{prefix}.{name}" if prefix else str(name), inner)
        elif not prefix.startswith(idle):
            flat[prefix] = value

    put("", renamed(yaml.safe_load(text)) if text else {})
    return flat


def _differing(settings: Sequence[JSONObject]) -> dict[str, list[Any]]:
    """Keys whose values are not the same in all runs, with the value of each run."""
    names = sorted({name for one in settings for name in one})
    by_name = {name: [one.get(name) for one in settings] for name in names}
    return {name: values for name, values in by_name.items() if any(v != values[0] for v in values)}


def _labels(
    paths: Sequence[Path], gathered: Sequence[ReportData], differs: Mapping[str, list[Any]]
) -> list[str]:
    """What tells the runs apart, as shortly as can be."""
    checkpoints = [data["checkpoint"] for data in gathered]
    if len(set(checkpoints)) == len(paths):
        return checkpoints
    for name, values in differs.items():
        labels = [f"{name.rpartition('.')[2]} {value}" for value in values]
        if name.startswith(OF_LABELS) and len(set(labels)) == len(paths):
            return labels
    names = [path.name for path in paths]
    return names if len(set(names)) == len(paths) else [str(path) for path in paths]


# What the runs say together.


def _validation(rows: Sequence[ComparedRun]) -> Validation | None:
    """How far predictions are right; None where nothing was both predicted and measured."""
    both = [(p, m) for row in rows if (p := row["predicted"]) and (m := row["measured"])]
    if not both:
        return None
    pairs = [row for row in rows if row["predicted"] and row["measured"]]
    gaps = [gap["interval"] for row in pairs if (gap := row["difference"]) is not None]
    bars = [bar for bar in gaps if bar]
    inside = [bar[0] <= p["value"] <= bar[1] for p, m in both if (bar := m["interval"])]
    errors = [row["relative_error"] for row in pairs if row["relative_error"] is not None]
    return {
        "runs": len(both),
        "mean_relative_error": sum(errors) / len(errors) if errors else None,
        "inside_interval": sum(inside) if inside else None,
        "with_interval": len(inside),
        "difference_covers_zero": sum(map(_covers, bars)) if bars else None,
        "with_paired_interval": len(bars),
        "correlation": _correlation([(p["value"], m["value"]) for p, m in both]),
    }


def _covers(interval: Sequence[float]) -> bool:
    return interval[0] <= 0 <= interval[1]


def _correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    if len(pairs) < 3:
        return None
    x, y = ([pair[i] - sum(p[i] for p in pairs) / len(pairs) for pair in pairs] for i in (0, 1))
    size = math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))
    return sum(a * b for a, b in zip(x, y)) / size if size else None


def _unlike(
    rows: Sequence[ComparedRun],
    settings: Sequence[JSONObject],
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


def _scaling(rows: Sequence[ComparedRun]) -> dict[str, float] | None:
    """Powers of B_E by which standard errors fall (-0.5 for independent prompts)."""
    out = {}
    for name in PAIR:
        points = [
            (math.log(size), math.log(stderr))
            for row in rows
            if (size := row["B_E"]) and (one := row[name]) and (stderr := one["stderr"])
        ]
        mean = [sum(pair[i] for pair in points) / len(points) for i in (0, 1)] if points else [0, 0]
        spread = sum((x - mean[0]) ** 2 for x, _ in points)
        if spread > 0:
            out[name] = sum((x - mean[0]) * (y - mean[1]) for x, y in points) / spread
    return out or None


# As tables of text, for a terminal and for a page.


class Table(NamedTuple):
    title: str
    about: str
    head: list[str]
    rows: list[list[str]]


def tables(comparison: Comparison) -> list[Table]:
    runs, unit = comparison["runs"], comparison["unit"]
    out = [
        Table(
            "Changes",
            f"nats per {unit}, 95 % intervals",
            [
                "run",
                "entropy",
                "predicted",
                "measured",
                *(["fresh"] if _has(runs, "fresh") else []),
            ],
            [
                [
                    row["label"],
                    words.plain(None if row["level"] is None else row["level"]["value"], 4),
                    _spoken(row["predicted"]),
                    _spoken(row["measured"]),
                    *([_spoken(row["fresh"])] if _has(runs, "fresh") else []),
                ]
                for row in runs
            ],
        ),
    ]
    if comparison["validation"]:
        out.append(
            Table(
                "Estimator validation",
                _validated(comparison["validation"]),
                ["run", "predicted − measured", "of the change", "line holds up to η"],
                [
                    [
                        row["label"],
                        _spoken(row["difference"]),
                        _share(row["relative_error"]),
                        words.plain(row["linear_range"], 2),
                    ]
                    for row in runs
                ],
            )
        )
    if any(row["B_E"] for row in runs):
        out.append(
            Table(
                "Batch size",
                comparison["not_scaled"] or _scaled(comparison["scaling"]),
                ["run", "B_E", "B_U", "s.e. predicted", "s.e. measured", "× √B_E", "seconds"],
                [_sized(row) for row in runs],
            )
        )
    if _has(runs, "weights"):
        names = ("eta", "ESS", "ESS_fraction", "w_max", "w_min", "kl", "clip_fraction", "k_hat")
        heads = ["at η", "ESS", "of all", "largest", "smallest", "KL", "clipped", "k-hat"]
        out.append(
            Table(
                "Importance weights",
                "ESS should be near the number of rollouts, the largest weight a few times 1",
                ["run", *heads, "trusted"],
                [
                    [
                        row["label"],
                        *(words.plain((row["weights"] or {}).get(name), 3) for name in names),
                        {True: "yes", False: "no", None: "–"}[row["trusted"]],
                    ]
                    for row in runs
                ],
            )
        )
    if comparison["differs"]:
        out.append(
            Table(
                "Settings that differ",
                "",
                ["key", *(row["label"] for row in runs)],
                [[name, *map(str, values)] for name, values in comparison["differs"].items()],
            )
        )
    return out


def _has(runs: Sequence[ComparedRun], name: Literal["fresh", "weights"]) -> bool:
    return any(row[name] is not None for row in runs)


def _spoken(number: ComparedNumber | None) -> str:
    if number is None:
        return "–"
    bar = "" if number["interval"] is None else f" ({words.ends(number['interval'])})"
    return f"{words.number(number['value'])}{bar}"


def _share(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.1%}"


def _validated(validation: Validation) -> str:
    sentences = []
    if validation["mean_relative_error"] is not None:
        sentences.append(
            f"mean error {validation['mean_relative_error']:.1%} of the measured change"
        )
    if validation["inside_interval"] is not None:
        of = f"{validation['inside_interval']} of {validation['with_interval']}"
        sentences.append(f"{of} predictions inside the measured interval")
    if validation["difference_covers_zero"] is not None:
        of = f"{validation['difference_covers_zero']} of {validation['with_paired_interval']}"
        sentences.append(f"{of} paired differences contain 0")
    if validation["correlation"] is not None:
        sentences.append(words.signed(f"correlation {validation['correlation']:.3f}"))
    return "; ".join(sentences)


def _scaled(powers: Mapping[str, float] | None) -> str:
    if powers is None:
        return "no standard errors"
    powers_text = ", ".join(f"{name} B_E^{value:.2f}" for name, value in powers.items())
    return words.signed(f"standard errors go as {powers_text} (independent prompts: B_E^-0.50)")


def _sized(row: ComparedRun) -> list[str]:
    errors = [None if one is None else one["stderr"] for one in (row["predicted"], row["measured"])]
    stderr = errors[1] if errors[1] is not None else errors[0]
    root = stderr * math.sqrt(row["B_E"]) if stderr is not None and row["B_E"] else None
    counts = ["–" if size is None else str(size) for size in (row["B_E"], row["B_U"])]
    seconds = row["seconds"]
    return [
        row["label"],
        *counts,
        *(words.plain(error, 2) for error in (*errors, root)),
        "–" if seconds is None else f"{seconds:.0f}",
    ]


def table_lines(comparison: Comparison) -> Iterator[str]:
    """Columns in line, whatever the width of the screen."""
    for table in tables(comparison):
        rows = [table.head, *table.rows]
        widths = [max(len(row[k]) for row in rows) for k in range(len(table.head))]
        yield from ("", f"{table.title}{f' ({table.about})' if table.about else ''}")
        for row in rows:
            first, *rest = zip(row, widths)
            cells = [f"{first[0]:{first[1]}}", *(f"{cell:>{width}}" for cell, width in rest)]
            yield "  " + "  ".join(cells).rstrip()
