"""What a log of `entropy-probe run` has for a report: more the more detailed it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import yaml

from entropy_experiments.config import renamed
from entropy_experiments.report import words
from entropy_experiments.report.html import books
from entropy_experiments.report.sections import (
    EnvironmentSection,
    ReportData,
    RolloutText,
    TextsSection,
    Verdict,
    as_number,
)
from entropy_experiments.results import (
    AnyNumber,
    EstimateResult,
    ProbeLog,
    SweepPoint,
    read_log,
)

LINES = ("momentum", "decay", "gradient")
OF_STUDIES = ("influence by rollout", "probability and advantage", "what if", "the matrix")
ONLY_STUDIES = "only a study has influences (entropy-probe influence)"
UNKNOWN_UNIT = "token or sequence (the log does not say which)"
NOT_A_NUMBER = "not a number"
E = TypeVar("E", EstimateResult, SweepPoint)


def log_data(path: str | Path) -> ReportData:
    """The sections that a log has."""
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
    out: ReportData = {
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
        "sizes": {"B_E": log["B_E"], "B_U": log["B_U"]},
        "seconds": (log.get("timing") or {}).get("total"),
        "absent": absent,
        "others": [],
        "rollouts": None,
        "covariance": None,
        "what_if": None,
        "matrix": None,
        "verdict": _verdict(log, predicted, measured, estimates, unit),
        "curve": None,
        "weights": None,
        "ledger": None,
        "momentum": None,
        "texts": None,
        "assumed": None,
        "environment": _environment(path, log, config),
    }
    if sweep and predicted is not None:
        reach = log.get("linear_range")
        out["curve"] = books.curve(lr, predicted, bend, sweep, linear_range=reach)
    elif level == "minimal":
        absent["step sizes, ledger and weights"] = "a minimal log has none (output.level: standard)"
    elif predicted is None:
        absent["predicted and measured"] = _why_null(log, "deltaH1") or (
            "the prediction was skipped (predict.enabled: false)"
        )
    else:
        absent["predicted and measured"] = _why_null(log, "deltaH_true") or (
            "no step size has a number"
            if "deltaH_true" in log
            else "nothing was measured (measure.enabled: false)"
        )
    if len(points) > len(sweep):
        absent["some step sizes"] = (
            f"{len(points) - len(sweep)} of {len(points)} measured changes are no numbers "
            "(`nulls` in the log says why)"
        )
    if sweep:
        out["weights"] = books.weights(sweep)
    parts = {name: _estimate(estimates, {}, name) for name in LINES}
    lines = {
        ("this batch's gradient" if name == "gradient" else name): part
        for name, part in parts.items()
        if part is not None
    }
    if predicted is not None and len(lines) == len(LINES):
        rest = None
        if measured is not None:
            curved = 0.0 if bend is None else bend["value"]
            rest = as_number(measured["value"] - predicted["value"] - curved)
        whole = books.book("entropy", f"nats per {unit}", lines, predicted, bend, measured, rest)
        out["ledger"] = books.ledger([{**whole, "notes": []}])
    out["texts"] = _texts(log, absent)
    if "assumed" in log:
        out["assumed"] = {
            "assumed": log["assumed"],
            "not_verifiable": log.get("not_verifiable", []),
            "notes": log.get("notes", []),
        }
    else:
        absent["what was assumed"] = f"a {level} log does not say (output.level: standard)"
    return out


def _estimate(
    estimates: Mapping[str, EstimateResult], log: ProbeLog | Mapping[str, float], name: str
) -> AnyNumber | None:
    """With its interval where the log has it; None: the phase was skipped, or found no number."""
    if name in estimates:
        return None if estimates[name]["value"] is None else _whole(estimates[name])
    value = log.get(name)
    return None if value is None else {"value": value, "interval": None, "trusted": None}


def _whole(estimate: E) -> E:
    """An interval of which an end is no number is none."""
    bar = estimate.get("interval")
    estimate = estimate.copy()
    estimate["interval"] = None if bar is None or None in bar else bar
    return estimate


def _why_null(log: ProbeLog, name: str) -> str | None:
    """The log's own reason for a null in the place of a number; None: the number was not asked."""
    if name not in log or log[name] is not None:
        return None
    why = (log.get("nulls") or {}).get(name, NOT_A_NUMBER)
    return f"{name} in the log is null: {why}"


def _verdict(
    log: ProbeLog,
    predicted: AnyNumber | None,
    measured: AnyNumber | None,
    estimates: Mapping[str, EstimateResult],
    unit: str,
) -> Verdict:
    points = []
    gap = _estimate(estimates, {}, "difference")
    if gap is not None:
        points.append(words.gap(gap))
    direct, state = (_estimate(estimates, {}, name) for name in ("direct", "state"))
    if direct is not None and state is not None:
        here, elsewhere = (words.number(term["value"], 2) for term in (direct, state))
        points.append(f"{here} by other choices in the same states, {elsewhere} by other states.")
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
    trusts = [one.get("trusted") for one in (predicted, measured) if one is not None]
    flags = [trusted for trusted in trusts if trusted is not None]
    return {
        "sentence": words.of_probe(log, predicted, measured, unit),
        "points": points,
        "trusted": all(flags) if flags else None,
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


def _report(log: ProbeLog, unit: str) -> list[str]:
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
        estimate, why = _estimate(estimates, log, key), _why_null(log, key)
        if estimate is None:
            lines += [] if why is None else [f"  {name:16} {NOT_A_NUMBER}: {why}"]
            continue
        sign = "" if key == "H_orig" else "+"
        bar = estimate["interval"]
        text = "" if bar is None else f" (95% {bar[0]:{sign}.3g} to {bar[1]:{sign}.3g})"
        lines.append(f"  {name:16} {estimate['value']:{sign}.4g} nats per {unit}{text}")
        lines += [f"    NOT trusted: {why}" for why in estimate.get("why_not") or ()]
    weights = log.get("diagnostics")
    if weights:
        ess, largest = (words.fixed(weights[name], k) for name, k in (("ESS", 1), ("w_max", 2)))
        lines.append(
            f"Importance weights: ESS {ess} of {weights.get('rollouts')} rollouts, largest "
            f"{largest}"
        )
    assumed = log.get("assumed")
    if assumed:
        text = ", ".join(f"{name} = {value}" for name, value in assumed.items())
        lines.append(f"ASSUMED, not read from any file: {text}.")
    return lines


def _texts(log: ProbeLog, absent: dict[str, str]) -> TextsSection | None:
    """Rollouts as text; a log has no influences to colour them with."""
    rollouts = log.get("update_rollouts")
    if not rollouts:
        absent["the update rollouts"] = (
            f"a {log['level']} log has no texts (output.level: detailed)"
        )
        return None
    prompts: dict[str, int] = {}
    rows: list[RolloutText] = []
    for i, rollout in enumerate(rollouts):
        row: RolloutText = {
            "i": i,
            "n": rollout["tokens"],
            "prompt": rollout["prompt_id"],
            "p": prompts.setdefault(rollout["prompt"], len(prompts)),
            "reward": rollout.get("reward"),
            "advantage": rollout.get("advantage"),
            "text": rollout["response"],
        }
        if rollout["truncated"]:
            row["truncated"] = True
        rows.append(row)
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


def _unit(log: ProbeLog, config: str | None) -> str:
    """Per what the log's numbers are. Of an earlier log, the configuration beside it says."""
    if "unit" in log:
        return log["unit"]
    if config is None:
        return UNKNOWN_UNIT
    entropy = renamed(yaml.safe_load(config) or {}).get("entropy") or {}
    return "token" if entropy.get("unit", "per_token") == "per_token" else "sequence"


def _environment(path: Path, log: ProbeLog, config: str | None) -> EnvironmentSection:
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
