"""A log as JSON: no NaN, a reason for every null, and short lines.

A number that JSON cannot hold is null, and `nulls` says why: by the field's name for what may lack,
by its place for what should have been finite. Error bars have six digits, values all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

ERROR_BARS = ("stderr", "interval", "bias", "noise_floor", "diagnostics")
"""Of an estimate in a log: told to six digits."""
NULLS = {
    "stderr": "no error bar: a single unit of resampling, or a method without one",
    "interval": "no error bar: a single unit of resampling, or a method without one",
    "bias": "no error bar, hence no estimate of the bias",
    "noise_floor": "rounding and repacking were not tried for this number",
    "k_hat": "says nothing: fewer than 100 rollouts, weights nearly equal, or not weighted at all",
    "samples_needed": "more than can be told: the policies are too far apart",
    "linear_range": "infinite: no curvature; or the slope's own interval contains 0",
    "git": "not run from a repository",
}
"""Why a field may be null."""
PLACES = 20
"""Numbers that should have been finite which `nulls` names one by one."""


def log_text(content: Mapping[str, Any]) -> str:
    """A line per key, and per rollout or estimate: short, and still to be read."""
    compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    lines = []
    for name, value in content.items():
        told = compact(value)
        if isinstance(value, list) and value and isinstance(value[0], dict | str):
            told = "[\n" + ",\n".join(f"  {compact(inner)}" for inner in value) + "]"
        elif isinstance(value, dict) and any(isinstance(v, dict) for v in value.values()):
            inner = ",\n".join(f"  {compact(k)}:{compact(v)}" for k, v in value.items())
            told = "{\n" + inner + "}"
        lines.append(f" {compact(name)}:{told}")
    return "{\n" + ",\n".join(lines) + "}\n"


def short(estimate: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _six(v) if k in ERROR_BARS else v for k, v in estimate.items()}


def _six(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _six(inner) for name, inner in value.items()}
    return [_six(inner) for inner in value] if isinstance(value, list) else value


def finite_only(content: dict[str, Any]) -> dict[str, Any]:
    """With null for what is no number, and the reasons."""
    places: dict[str, str] = {}
    out = _without_nan(content, "", places)
    lacking = dict.fromkeys(name for name in _null_names(out) if name in NULLS)
    nulls = {name: NULLS[name] for name in lacking}
    nulls |= dict(list(places.items())[:PLACES])
    if len(places) > PLACES:
        nulls["and elsewhere"] = f"{len(places) - PLACES} more numbers that are not finite"
    return {**out, "nulls": nulls} if nulls else out


def _without_nan(value: Any, place: str, places: dict[str, str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        places[place] = f"not finite: {value}"
        return None
    if isinstance(value, dict):
        at = f"{place}." if place else ""
        return {k: _without_nan(v, f"{at}{k}", places) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v, f"{place}[{i}]", places) for i, v in enumerate(value)]
    return value


def _null_names(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if inner is None:
                yield name
            else:
                yield from _null_names(inner)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from _null_names(inner)
