"""What a log of `entropy-probe run` has for a report: more the more detailed it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from entropy_experiments.config import renamed
from entropy_experiments.report.html import books, words
from entropy_experiments.report.log_files import read_log

LINES = ("momentum", "decay", "gradient")
OF_STUDIES = ("influence by rollout", "probability and advantage", "what if", "the matrix")
ONLY_STUDIES = "only a study has influences (entropy-probe influence)"
UNKNOWN_UNIT = "token or sequence (the log does not say which)"
NOT_A_NUMBER = "not a number"


def log_data(path: str | Path) -> dict[str, Any]:
    path = Path(path)
    log = read_log(path)
    level, lr = log["level"], log["learning_rate"]
    config = _config(path)
    unit = _unit(log, config)
    estimates = log.get("estimates") or {}
    predicted = _estimate(estimates, log, "deltaH1")
    measured = _estimate(estimates, log, "deltaH_true")
    bend = _estimate(estimates, log, "curvature_term")
    points = log.get("sweep") or ()
    sweep = [(one["eta"], _whole(one)) for one in points if one["value"] is not None]
    absent: dict[str, str] = dict.fromkeys(OF_STUDIES, ONLY_STUDIES)
    out: dict[str, Any] = {
        "kind": "probe",
        "title": f"Entropy change at {log['checkpoint']}",
        "checkpoint": log["checkpoint"],
        "source": path.name,
        "key": None,
        "lr": lr,
        "unit": unit,
        "level": _estimate(estimates, log, "H_orig"),
        "predicted": predicted,
        "measured": measured,
        "difference": _estimate(estimates, log, "difference"),
        "sizes": {name: log[name] for name in ("B_E", "B_U")},
        "seconds": (log.get("timing") or {}).get("total"),
        "absent": absent,
        "others": [],
        **dict.fromkeys(("rollouts", "covariance", "what_if", "matrix")),
    }
    out["verdict"] = _verdict(log, predicted, measured, estimates, unit)
    out["curve"] = out["weights"] = out["ledger"] = None
    if sweep and predicted is not None:
        reach = log.get("linear_range")
        out["curve"] = books.curve(lr, predicted, bend, sweep, linear_range=reach)
    elif level == "minimal":
        absent["step sizes, ledger and weights"] = (
            "a minimal log has none (detailed_logging.level: standard)"
        )
    elif predicted is None:
        absent["predicted and measured"] = _why_null(log, "deltaH1") or (
            "the prediction was skipped (probe_rework.compute_delta_h1: false)"
        )
    else:
        absent["predicted and measured"] = _why_null(log, "deltaH_true") or (
            "no step size has a number"
            if "deltaH_true" in log
            else "nothing was measured (importance.enabled: false)"
        )
    if len(points) > len(sweep):
        absent["some step sizes"] = (
            f"{len(points) - len(sweep)} of {len(points)} measured changes are no numbers "
            "(`nulls` in the log says why)"
        )
    if sweep:
        out["weights"] = books.weights(sweep)
    parts = {name: _estimate(estimates, {}, name) for name in LINES}
    if predicted is not None and all(part is not None for part in parts.values()):
        lines = {
            ("this batch's gradient" if name == "gradient" else name): part
            for name, part in parts.items()
        }
        rest = None
        if measured is not None:
            gap = measured["value"] - predicted["value"] - (bend or {"value": 0.0})["value"]
            rest = {"value": gap}
        whole = books.book("entropy", f"nats per {unit}", lines, predicted, bend, measured, rest)
        out["ledger"] = books.ledger([{**whole, "notes": []}])
    out["texts"] = _texts(log, absent)
    out["assumed"] = None
    if "assumed" in log:
        told = ("assumed", "not_verifiable", "notes")
        out["assumed"] = {name: log[name] for name in told}
    else:
        absent["what was assumed"] = (
            f"a {level} log does not say (detailed_logging.level: standard)"
        )
    out["environment"] = _environment(path, log, config)
    return out


def _estimate(estimates: Mapping[str, Any], log: Mapping[str, Any], name: str) -> Any:
    """With its interval where the log has it; None: the phase was skipped, or found no number."""
    if name in estimates:
        return None if estimates[name]["value"] is None else _whole(estimates[name])
    value = log.get(name)
    return None if value is None else {"value": value, "interval": None, "trusted": None}


def _whole(estimate: Mapping[str, Any]) -> dict[str, Any]:
    """An interval of which an end is no number is none."""
    bar = estimate.get("interval")
    return {**estimate, "interval": None if bar is None or None in bar else bar}


def _why_null(log: Mapping[str, Any], name: str) -> str | None:
    """The log's own reason for a null in the place of a number; None: the number was not asked."""
    if name not in log or log[name] is not None:
        return None
    why = (log.get("nulls") or {}).get(name, NOT_A_NUMBER)
    return f"{name} in the log is null: {why}"


def _verdict(
    log: Mapping[str, Any],
    predicted: Any,
    measured: Any,
    estimates: Mapping[str, Any],
    unit: str,
) -> dict[str, Any]:
    points = []
    gap = _estimate(estimates, {}, "difference")
    if gap is not None:
        points.append(words.gap(gap))
    terms = [_estimate(estimates, {}, name) for name in ("direct", "state")]
    if all(terms):
        direct, state = (words.number(term["value"], 2) for term in terms)
        points.append(f"{direct} by other choices in the same states, {state} by other states.")
    if "linear_range" in log and log["linear_range"] is not None:
        points.append(f"The straight line holds within 10 % up to eta {log['linear_range']:.2g}.")
    certificate = log.get("step_certificate")
    if certificate is not None:
        share = certificate["share"]
        how = (
            f"{certificate['relative_error']:.2g} away by the recorded fingerprint"
            if share is None
            else f"{share:.2%} of the elements to rounding"
        )
        points.append(f"Step certificate {'passed' if certificate['passed'] else 'FAILED'}: {how}.")
    points += words.sampling_points(log.get("notes") or ())
    known = [one["trusted"] for one in (predicted, measured) if one and one["trusted"] is not None]
    return {
        "sentence": words.of_probe(log, predicted, measured, unit),
        "points": points,
        "trusted": all(known) if known else None,
        "doubts": [
            *words.doubts_of(predicted, measured),
            *filter(None, (_why_null(log, name) for name in ("H_orig", "deltaH1", "deltaH_true"))),
        ],
        "text": _report(log, unit),
    }


def log_report(path: str | Path) -> list[str]:
    """A log in words, for a terminal."""
    log = read_log(path)
    return _report(log, _unit(log, _config(Path(path))))


def _report(log: Mapping[str, Any], unit: str) -> list[str]:
    estimates = log.get("estimates") or {}
    lines = [
        f"{words.made_by_training(log).rstrip(',')}, at learning rate {log['learning_rate']:.3g}:"
    ]
    shown = (
        ("entropy now", "H_orig"),
        ("predicted change", "deltaH1"),
        ("measured change", "deltaH_true"),
        ("difference", "difference"),
        ("curvature adds", "curvature_term"),
    )
    for name, key in shown:
        found, why = _estimate(estimates, log, key), _why_null(log, key)
        if found is None:
            lines += [] if why is None else [f"  {name:16} {NOT_A_NUMBER}: {why}"]
            continue
        sign = "" if key == "H_orig" else "+"
        bar = found["interval"]
        told = "" if bar is None else f" (95% {bar[0]:{sign}.3g} to {bar[1]:{sign}.3g})"
        lines.append(f"  {name:16} {found['value']:{sign}.4g} nats per {unit}{told}")
        lines += [f"    NOT trusted: {why}" for why in found.get("why_not") or ()]
    weights = log.get("diagnostics")
    if weights:
        ess, largest = (words.fixed(weights[name], k) for name, k in (("ESS", 1), ("w_max", 2)))
        lines.append(
            f"Importance weights: ESS {ess} of {weights['rollouts']} rollouts, largest {largest}"
        )
    if log.get("assumed"):
        told = ", ".join(f"{name} = {value}" for name, value in log["assumed"].items())
        lines.append(f"ASSUMED, not read from any file: {told}.")
    return lines


def _texts(log: Mapping[str, Any], absent: dict[str, str]) -> dict[str, Any] | None:
    """Rollouts as text; a log has no influences to colour them with."""
    found = log.get("update_rollouts")
    if not found:
        absent["the update rollouts"] = (
            f"a {log['level']} log has no texts (detailed_logging.level: detailed)"
        )
        return None
    prompts: dict[str, int] = {}
    rows = [
        {
            "i": i,
            "n": row["tokens"],
            "prompt": row["prompt_id"],
            "p": prompts.setdefault(row["prompt"], len(prompts)),
            "reward": row.get("reward"),
            "advantage": row.get("advantage"),
            "text": row["response"],
            **({"truncated": True} if row["truncated"] else {}),
        }
        for i, row in enumerate(found)
    ]
    return {
        "prompts": list(prompts),
        "rollouts": rows,
        "tokens": sum(row["n"] for row in rows),
        "without_tokens": 0,
    }


def _config(path: Path) -> str | None:
    """The exact configuration, which is a file of its own beside the log."""
    stem = path.name.removesuffix(".gz").removesuffix(".json")
    beside = path.with_name(f"{stem}_config.yaml")
    return beside.read_text(encoding="utf-8") if beside.is_file() else None


def _unit(log: Mapping[str, Any], config: str | None) -> str:
    """Per what the log's numbers are. Of an earlier log, the configuration beside it says."""
    if "unit" in log:
        return log["unit"]
    if config is None:
        return UNKNOWN_UNIT
    entropy = renamed(yaml.safe_load(config) or {}).get("entropy") or {}
    return "token" if entropy.get("unit", "per_token") == "per_token" else "sequence"


def _environment(path: Path, log: Mapping[str, Any], config: str | None) -> dict[str, Any]:
    provenance = log.get("provenance") or {}
    sizes = f"{log['B_E']} evaluation prompts, {log['B_U']} update prompts"
    return {
        "facts": {
            "log": f"{path.name}, level {log['level']}",
            "learning rate": words.plain(log["learning_rate"]),
            "batches": sizes,
            "seconds": words.fixed((log.get("timing") or {}).get("total"), 1),
        },
        "versions": {k: v for k, v in provenance.items() if not isinstance(v, dict | list)},
        "config": config,
    }
