"""The log of a run, at four levels, each with all that the one before has.

    minimal    the core numbers, timing, batch sizes
    standard   + every estimate, the sweep, batch statistics, weights, update norms, messages
               (sampling retries, norms, times) and provenance
    detailed   + every rollout: prompt, response, log-prob, entropy, weight, reward, advantage
    debug      + every token of every rollout; the tensors as computed, each parameter's share

Three files: the log, a summary with the core numbers, and the exact config. The `log_*` switches
only take away from what the level allows. Each file appears whole or not at all.

A number that JSON cannot hold is null, and `nulls` says why: by the field's name for what may lack,
by its place for what should have been finite. Error bars have six digits, values all.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from entropy_experiments.artifacts import write_whole
from entropy_experiments.config import Config, config_yaml
from entropy_experiments.findings import Findings, results_of
from entropy_experiments.results import (
    PROBE_LOG,
    EstimateResult,
    JSONObject,
    LogBatches,
    LogRollout,
    ProbeLog,
    RawResult,
    RawTensor,
    Spread,
    UpdateVectorResult,
    logs_below,
    newest_log,
    read_log,
)
from entropy_experiments.types import Rollouts, Scores

__all__ = ["CORE", "LEVELS", "DetailedLogger", "newest_log", "read_log"]

RAW_GRADIENT = 100_000
"""Elements of a loss gradient that a debug log holds at most."""
BESIDE = ("summary.json", "config.yaml", "report.html")
"""What a log's files are called beside it; the report is there if someone asked for it."""
LEVELS = ("minimal", "standard", "detailed", "debug")
CORE = (
    *("checkpoint", "update", "bars_dot", "deltaH1", "deltaH_true", "learning_rate"),
    "unit",
    *("H_orig", "H_upd", "B_E", "B_U", "timing"),
)

ERROR_BARS = ("stderr", "interval", "bias", "noise_floor", "diagnostics")
"""Of an estimate in a log: rounded to six digits."""
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

Decode = Callable[[list[int]], str]


class DetailedLogger:
    """Writes the log of a probe; `write` returns the log's path.

    Args:
        config: Its `output` section says how much, and where.

    Examples:
        >>> from entropy_experiments.pipelines.probe_log import LEVELS
        >>> LEVELS
        ('minimal', 'standard', 'detailed', 'debug')
        >>> logger = DetailedLogger(parse_config({"output": {"level": "minimal"}}))
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._settings = config.output

    def write(self, found: Findings, decode: Decode, now: datetime | None = None) -> Path | None:
        """None when logging is switched off."""
        settings = self._settings
        if not settings.log:
            return None
        now = now or datetime.now()
        folder = Path(settings.folder) / now.strftime("%Y-%m-%d")
        folder.mkdir(parents=True, exist_ok=True)
        stem = _free_stem(folder, f"entropy_probe_{now.strftime('%H-%M-%S')}_{found.checkpoint}")
        text = log_text(self.content(found, decode))
        if settings.compress:
            path = folder / f"{stem}.json.gz"
            # A fixed mtime: the same run writes the same bytes.
            write_whole(path, gzip.compress(text.encode(), mtime=0))
        else:
            path = folder / f"{stem}.json"
            write_whole(path, text.encode())
        core = PROBE_LOG.stamp | {k: v for k, v in results_of(found).items() if k in CORE}
        summary = json.dumps(finite_only(core), indent=1, allow_nan=False)
        write_whole(folder / f"{stem}_summary.json", summary.encode())
        write_whole(folder / f"{stem}_config.yaml", self._config_text(found).encode())
        if settings.max_logs:
            _rotate(Path(settings.folder), settings.max_logs, keep=path)
        return path

    def content(self, found: Findings, decode: Decode) -> ProbeLog:
        """What the log holds at the level asked for: JSON values, none of them NaN."""
        return cast(ProbeLog, finite_only(self._content(found, decode)))

    def _content(self, findings: Findings, decode: Decode) -> JSONObject:
        settings = self._settings
        results: JSONObject = dict(results_of(findings))
        depth = LEVELS.index(settings.level)
        head = {**PROBE_LOG.stamp, "level": settings.level}
        if depth == 0:
            return head | {name: results[name] for name in CORE if name in results}
        results["estimates"] = {n: short(e) for n, e in results["estimates"].items()}
        if "sweep" in results:
            results["sweep"] = [short(point) for point in results["sweep"]]
        content = head | results | head
        content |= {"batches": _batches(findings), "update_vector": _update(findings)}
        content["messages"] = messages(findings)
        content["provenance"] = dict(findings.provenance)
        if depth >= 2 and settings.log_sequences:
            tokens = depth >= 3 and settings.log_tokens
            content["evaluation_rollouts"] = _rollouts(
                findings.evaluation,
                findings.evaluation_scores,
                decode,
                tokens,
                _evaluation(findings),
            )
            content["update_rollouts"] = _rollouts(
                findings.update.rollouts,
                findings.stats.found.scores,
                decode,
                tokens,
                _rewards(findings),
            )
        if depth >= 3 and settings.log_raw_tensors:
            content["raw"] = _raw(findings)
        return content

    def _config_text(self, findings: Findings) -> str:
        lines = json.dumps(dict(findings.provenance), indent=1, allow_nan=False).splitlines()
        return config_yaml(self._config) + "\n".join(
            ["# provenance", *(f"# {x}" for x in lines), ""]
        )


def _batches(findings: Findings) -> LogBatches:
    batch = findings.update
    inside_NS = batch.rollouts.response_NS
    out: LogBatches = {
        "evaluation": {
            "rollouts": len(findings.evaluation),
            "length": _spread(findings.evaluation.tokens_N),
            "truncated": findings.evaluation.truncated_share,
        },
        "update": {
            "rollouts": len(batch.rollouts),
            "length": _spread(batch.rollouts.tokens_N),
            "truncated": batch.rollouts.truncated_share,
            "advantage": _spread(batch.advantage_NS[inside_NS]),
        },
    }
    if findings.retries is not None:
        out["update"]["retries"] = findings.retries
    if batch.reward_N is not None:
        out["update"]["reward"] = _spread(batch.reward_N)
    return out


def _update(findings: Findings) -> UpdateVectorResult:
    stats = findings.stats
    return {
        "loss": stats.loss,
        "step": stats.step,
        "grad_norm": stats.grad_norm,
        "clipped_norm": stats.clipped_norm,
        "clip_factor": stats.clip_factor,
        "microbatches": stats.microbatches,
        "precision": dict(stats.precision),
        "part_norms": dict(stats.part_norms),
    }


def _evaluation(findings: Findings) -> dict[str, Tensor]:
    if findings.change is None:
        return {}
    shown = ("integrand_N", "entropy_N")
    logweight_N = findings.change.diagnostics["weights"].logweight_N
    weights = {"logweight": logweight_N, "weight": logweight_N.exp()}
    return weights | {n[:-2]: findings.change.diagnostics[n] for n in shown}


def _rewards(findings: Findings) -> dict[str, Tensor]:
    batch = findings.update
    inside_NS = batch.rollouts.response_NS
    summed_N = torch.where(inside_NS, batch.advantage_NS, 0.0).sum(1)
    out = {"advantage": summed_N / batch.rollouts.tokens_N}
    if batch.reward_N is not None:
        out["reward"] = batch.reward_N
    return out


def _rollouts(
    rollouts: Rollouts, scores: Scores, decode: Decode, tokens: bool, more: Mapping[str, Tensor]
) -> list[LogRollout]:
    rows: list[LogRollout] = []
    for i in range(len(rollouts)):
        inside_S = rollouts.response_NS[i]
        before_S = rollouts.attention_NS[i] & ~inside_S
        response = rollouts.tokens_NS[i][inside_S].tolist()
        row: JSONObject = {
            "prompt_id": int(rollouts.prompt_N[i]),
            "prompt": decode(rollouts.tokens_NS[i][before_S].tolist()),
            "response": decode(response),
            "tokens": len(response),
            "truncated": bool(rollouts.truncated_N[i]),
            "logprob": float(scores.logprob_NS[i][inside_S].sum()),
            "entropy": float(scores.entropy_NS[i][inside_S].sum()),
            **{name: float(value_N[i]) for name, value_N in more.items()},
        }
        if tokens:
            row["token_ids"] = response
            row["token_logprob"] = _rounded(scores.logprob_NS[i][inside_S])
            row["token_entropy"] = _rounded(scores.entropy_NS[i][inside_S])
        rows.append(cast(LogRollout, row))  # which numbers there are depends on the batch
    return rows


def _raw(findings: Findings) -> RawResult:
    """The arrays behind the numbers, padding and all, in every digit."""
    gradient = findings.stats.found.gradient
    size = sum(g.numel() for g in gradient.values())
    return {
        "evaluation": _tensors(findings.evaluation, findings.evaluation_scores)
        | {name: _raw_tensor(x_N) for name, x_N in _evaluation(findings).items()},
        "update": _tensors(findings.update.rollouts, findings.stats.found.scores)
        | {"advantage_NS": _raw_tensor(findings.update.advantage_NS)},
        # In digits, a gradient of more than this would be most of a very large file.
        "loss_gradient": {name: _raw_tensor(g) for name, g in gradient.items()}
        if size <= RAW_GRADIENT
        else f"left out: {size} elements, more than {RAW_GRADIENT}",
        "shares": {part: dict(shares) for part, shares in findings.stats.shares.items()},
    }


def _tensors(rollouts: Rollouts, scores: Scores) -> dict[str, RawTensor]:
    names = ("tokens_NS", "attention_NS", "response_NS", "prompt_N", "weight_N")
    out = {name: _raw_tensor(getattr(rollouts, name)) for name in names}
    return out | {name: _raw_tensor(x_NS) for name, x_NS in scores._asdict().items()}


def _raw_tensor(x: Tensor) -> RawTensor:
    # A mask as 0 and 1: shorter than false and true.
    values = x.int() if x.dtype == torch.bool else x
    kind = str(x.dtype).removeprefix("torch.")
    return {"dtype": kind, "shape": list(x.shape), "values": values.detach().tolist()}


def _rounded(x: Tensor) -> list[float]:
    return [float(f"{value:.7g}") for value in x.tolist()]


def _spread(x: Tensor) -> Spread:
    x = x.double()
    spread = float(x.std()) if x.numel() > 1 else 0.0
    return {
        "mean": float(x.mean()),
        "std": spread,
        "min": float(x.min()),
        "median": float(x.median()),
        "max": float(x.max()),
    }


def _free_stem(folder: Path, stem: str) -> str:
    """Two runs within a second must not share files."""
    tried, count = stem, 1
    while (folder / f"{tried}_summary.json").exists():
        count += 1
        tried = f"{stem}-{count}"
    return tried


def _rotate(directory: Path, most: int, *, keep: Path) -> None:
    """Keep the newest runs; a run is its three files."""
    logs = logs_below(directory)
    logs.sort(key=lambda p: (p.stat().st_mtime, p.name))
    for old in logs[: max(0, len(logs) - most)]:
        if old == keep:
            continue
        stem = old.name.removesuffix(".gz").removesuffix(".json")
        for name in (old.name, *(f"{stem}_{end}" for end in BESIDE)):
            (old.parent / name).unlink(missing_ok=True)


# What was done, a line each.


def messages(findings: Findings) -> list[str]:
    """What a run did, in a line each; the screen shows them too."""
    return [
        _sampling_message(findings),
        _update_message(findings),
        *_clip_messages(findings),
        _timing_message(findings),
    ]


def _sampling_message(findings: Findings) -> str:
    rollouts, batch = findings.evaluation, findings.update.rollouts
    sentence = (
        f"sampling: {len(rollouts)} evaluation rollouts, {rollouts.truncated_share:.0%} cut off at "
        f"the length limit; update batch {'recorded' if findings.real else 'drawn'}, {len(batch)} "
        "rollouts"
    )
    if findings.retries is None:
        return sentence
    again = "no group" if findings.retries == 0 else f"{findings.retries} group(s)"
    return f"{sentence}, {again} drawn again for equal rewards"


def _update_message(findings: Findings) -> str:
    stats = findings.stats
    parts = ", ".join(f"{name} {norm:.3g}" for name, norm in stats.part_norms.items())
    clip = "not clipped" if stats.clip_factor == 1 else f"clipped to {stats.clipped_norm:.3g}"
    if findings.made.of_gradient:
        clip = f"rebuilt from the batch; training's own, after clipping: {stats.clipped_norm:.3g}"
    return (
        f"update vector: gradient norm {stats.grad_norm:.3g} ({clip}), {stats.microbatches} "
        f"microbatches; norms per unit learning rate: {parts}"
    )


def _clip_messages(findings: Findings) -> list[str]:
    """Etas at which the estimator clipped weights."""
    clipped = {
        eta: change.diagnostics["weights"].clip_fraction
        for eta, change in sorted((findings.measured or {}).items())
    }
    shares = [f"{share:.1%} at eta {eta:g}" for eta, share in clipped.items() if share > 0]
    return [f"estimator: log-weights clipped, {', '.join(shares)}"] if shares else []


def _timing_message(findings: Findings) -> str:
    spent = ", ".join(f"{name} {took:.2g}" for name, took in findings.timing.items())
    return f"seconds: {spent}"


# JSON: no NaN, a reason for every null, and short lines.


def log_text(content: ProbeLog) -> str:
    """A line per key, and per rollout or estimate: short, and still to be read."""
    compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    lines = []
    for name, value in content.items():
        text = compact(value)
        if isinstance(value, list) and value and isinstance(value[0], dict | str):
            text = "[\n" + ",\n".join(f"  {compact(inner)}" for inner in value) + "]"
        elif isinstance(value, dict) and any(isinstance(v, dict) for v in value.values()):
            inner = ",\n".join(f"  {compact(k)}:{compact(v)}" for k, v in value.items())
            text = "{\n" + inner + "}"
        lines.append(f" {compact(name)}:{text}")
    return "{\n" + ",\n".join(lines) + "}\n"


def short(estimate: EstimateResult) -> JSONObject:
    return {k: _six(v) if k in ERROR_BARS else v for k, v in estimate.items()}


def _six(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _six(inner) for name, inner in value.items()}
    return [_six(inner) for inner in value] if isinstance(value, list) else value


def finite_only(content: JSONObject) -> JSONObject:
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
