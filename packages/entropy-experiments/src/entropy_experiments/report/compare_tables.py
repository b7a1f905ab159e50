"""Runs side by side as tables of text, for a terminal and for a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from entropy_experiments.report.html import words


class Table(NamedTuple):
    title: str
    about: str
    head: list[str]
    rows: list[list[str]]


def tables(found: Mapping[str, Any]) -> list[Table]:
    runs, unit = found["runs"], found["unit"]
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
                    words.plain((row["level"] or {}).get("value"), 4),
                    _spoken(row["predicted"]),
                    _spoken(row["measured"]),
                    *([_spoken(row["fresh"])] if _has(runs, "fresh") else []),
                ]
                for row in runs
            ],
        ),
    ]
    if found["validation"]:
        out.append(
            Table(
                "Estimator validation",
                _validated(found["validation"]),
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
                found["not_scaled"] or _scaled(found["scaling"]),
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
    if found["differs"]:
        out.append(
            Table(
                "Settings that differ",
                "",
                ["key", *(row["label"] for row in runs)],
                [[name, *map(str, values)] for name, values in found["differs"].items()],
            )
        )
    return out


def _has(runs: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(row[name] is not None for row in runs)


def _spoken(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "–"
    bar = "" if found["interval"] is None else f" ({words.ends(found['interval'])})"
    return f"{words.number(found['value'])}{bar}"


def _share(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.1%}"


def _validated(found: Mapping[str, Any]) -> str:
    told = []
    if found["mean_relative_error"] is not None:
        told.append(f"mean error {found['mean_relative_error']:.1%} of the measured change")
    if found["inside_interval"] is not None:
        of = f"{found['inside_interval']} of {found['with_interval']}"
        told.append(f"{of} predictions inside the measured interval")
    if found["difference_covers_zero"] is not None:
        of = f"{found['difference_covers_zero']} of {found['with_paired_interval']}"
        told.append(f"{of} paired differences contain 0")
    if found["correlation"] is not None:
        told.append(words.signed(f"correlation {found['correlation']:.3f}"))
    return "; ".join(told)


def _scaled(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "no standard errors"
    told = ", ".join(f"{name} B_E^{value:.2f}" for name, value in found.items())
    return words.signed(f"standard errors go as {told} (independent prompts: B_E^-0.50)")


def _sized(row: Mapping[str, Any]) -> list[str]:
    errors = [(row[name] or {}).get("stderr") for name in ("predicted", "measured")]
    known = errors[1] if errors[1] is not None else errors[0]
    root = known * math.sqrt(row["B_E"]) if known is not None and row["B_E"] else None
    counts = ["–" if row[name] is None else str(row[name]) for name in ("B_E", "B_U")]
    seconds = row["seconds"]
    return [
        row["label"],
        *counts,
        *(words.plain(error, 2) for error in (*errors, root)),
        "–" if seconds is None else f"{seconds:.0f}",
    ]


def table_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Columns in line, whatever the width of the screen."""
    for table in tables(found):
        rows = [table.head, *table.rows]
        widths = [max(len(row[k]) for row in rows) for k in range(len(table.head))]
        yield from ("", f"{table.title}{f' ({table.about})' if table.about else ''}")
        for row in rows:
            first, *rest = zip(row, widths)
            cells = [f"{first[0]:{first[1]}}", *(f"{cell:>{width}}" for cell, width in rest)]
            yield "  " + "  ".join(cells).rstrip()
