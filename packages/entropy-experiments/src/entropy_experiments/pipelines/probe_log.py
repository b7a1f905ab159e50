"""The log of a run, at four levels, each with all that the one before has.

    minimal    the core numbers, timing, batch sizes
    standard   + every estimate, the sweep, batch statistics, weights, update norms, messages
               (sampling retries, norms, times) and provenance
    detailed   + every rollout: prompt, response, log-prob, entropy, weight, reward, advantage
    debug      + every token of every rollout; the tensors as computed, each parameter's share

Three files: the log, a summary with the core numbers, and the exact config. The `log_*` switches
only take away from what the level allows. Each file appears whole or not at all.

A number that JSON cannot hold is null, and `nulls` says why (`log_json`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.artifacts import write_whole
from entropy_experiments.config import Config, config_yaml
from entropy_experiments.findings import Findings, results_of
from entropy_experiments.report.log_files import SCHEMA, logs_below, newest_log, read_log
from entropy_experiments.report.log_json import finite_only, log_text, short
from entropy_experiments.report.messages import messages
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

Decode = Callable[[list[int]], str]


class DetailedLogger:
    """Writes what a probe found; `write` returns the path of the log."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._settings = config.detailed_logging

    def write(self, found: Findings, decode: Decode, now: datetime | None = None) -> Path | None:
        """None when logging is switched off."""
        settings = self._settings
        if not settings.enabled:
            return None
        now = now or datetime.now()
        folder = Path(settings.output_directory) / now.strftime("%Y-%m-%d")
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
        core = {"schema": SCHEMA, **{k: v for k, v in results_of(found).items() if k in CORE}}
        summary = json.dumps(finite_only(core), indent=1, allow_nan=False)
        write_whole(folder / f"{stem}_summary.json", summary.encode())
        write_whole(folder / f"{stem}_config.yaml", self._config_text(found).encode())
        if settings.max_files:
            _rotate(Path(settings.output_directory), settings.max_files, keep=path)
        return path

    def content(self, found: Findings, decode: Decode) -> dict[str, Any]:
        """What the log holds at the level asked for: JSON values, none of them NaN."""
        return finite_only(self._content(found, decode))

    def _content(self, found: Findings, decode: Decode) -> dict[str, Any]:
        settings, results = self._settings, results_of(found)
        depth = LEVELS.index(settings.level)
        head = {"schema": SCHEMA, "level": settings.level}
        if depth == 0:
            return {**head, **{name: results[name] for name in CORE if name in results}}
        results["estimates"] = {n: short(e) for n, e in results["estimates"].items()}
        if "sweep" in results:
            results["sweep"] = [short(point) for point in results["sweep"]]
        content = {**head, **results, "batches": _batches(found), "update_vector": _update(found)}
        content["messages"] = messages(found)
        content["provenance"] = dict(found.provenance)
        if depth >= 2 and settings.log_sequences:
            tokens = depth >= 3 and settings.log_tokens
            content["evaluation_rollouts"] = _rollouts(
                found.evaluation, found.evaluation_scores, decode, tokens, _evaluation(found)
            )
            content["update_rollouts"] = _rollouts(
                found.update.rollouts, found.stats.found.scores, decode, tokens, _rewards(found)
            )
        if depth >= 3 and settings.log_raw_tensors:
            content["raw"] = _raw(found)
        return content

    def _config_text(self, found: Findings) -> str:
        told = json.dumps(dict(found.provenance), indent=1, allow_nan=False).splitlines()
        return config_yaml(self._config) + "\n".join(
            ["# provenance", *(f"# {x}" for x in told), ""]
        )


def _batches(found: Findings) -> dict[str, Any]:
    batch = found.update
    inside_NS = batch.rollouts.response_NS
    out = {
        "evaluation": {
            "rollouts": len(found.evaluation),
            "length": _spread(found.evaluation.tokens_N),
            "truncated": found.evaluation.truncated_share,
        },
        "update": {
            "rollouts": len(batch.rollouts),
            "length": _spread(batch.rollouts.tokens_N),
            "truncated": batch.rollouts.truncated_share,
            "advantage": _spread(batch.advantage_NS[inside_NS]),
        },
    }
    if found.retries is not None:
        out["update"]["retries"] = found.retries
    if batch.reward_N is not None:
        out["update"]["reward"] = _spread(batch.reward_N)
    return out


def _update(found: Findings) -> dict[str, Any]:
    stats = found.stats
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


def _evaluation(found: Findings) -> dict[str, Tensor]:
    if found.change is None:
        return {}
    shown = ("integrand_N", "entropy_N")
    logweight_N = found.change.diagnostics["weights"].logweight_N
    weights = {"logweight": logweight_N, "weight": logweight_N.exp()}
    return weights | {n[:-2]: found.change.diagnostics[n] for n in shown}


def _rewards(found: Findings) -> dict[str, Tensor]:
    batch = found.update
    inside_NS = batch.rollouts.response_NS
    summed_N = torch.where(inside_NS, batch.advantage_NS, 0.0).sum(1)
    out = {"advantage": summed_N / batch.rollouts.tokens_N}
    if batch.reward_N is not None:
        out["reward"] = batch.reward_N
    return out


def _rollouts(
    rollouts: Rollouts, scores: Scores, decode: Decode, tokens: bool, more: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    rows = []
    for i in range(len(rollouts)):
        inside_S = rollouts.response_NS[i]
        before_S = rollouts.attention_NS[i] & ~inside_S
        response = rollouts.tokens_NS[i][inside_S].tolist()
        row: dict[str, Any] = {
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
        rows.append(row)
    return rows


def _raw(found: Findings) -> dict[str, Any]:
    """The arrays behind the numbers, padding and all, in every digit."""
    gradient = found.stats.found.gradient
    size = sum(g.numel() for g in gradient.values())
    return {
        "evaluation": _tensors(found.evaluation, found.evaluation_scores)
        | {name: _raw_tensor(x_N) for name, x_N in _evaluation(found).items()},
        "update": _tensors(found.update.rollouts, found.stats.found.scores)
        | {"advantage_NS": _raw_tensor(found.update.advantage_NS)},
        # In digits, a gradient of more than this would be most of a very large file.
        "loss_gradient": {name: _raw_tensor(g) for name, g in gradient.items()}
        if size <= RAW_GRADIENT
        else f"left out: {size} elements, more than {RAW_GRADIENT}",
        "shares": {part: dict(shares) for part, shares in found.stats.shares.items()},
    }


def _tensors(rollouts: Rollouts, scores: Scores) -> dict[str, Any]:
    names = ("tokens_NS", "attention_NS", "response_NS", "prompt_N", "weight_N")
    out = {name: _raw_tensor(getattr(rollouts, name)) for name in names}
    return out | {name: _raw_tensor(x_NS) for name, x_NS in scores._asdict().items()}


def _raw_tensor(x: Tensor) -> dict[str, Any]:
    # A mask as 0 and 1: shorter than false and true.
    values = x.int() if x.dtype == torch.bool else x
    kind = str(x.dtype).removeprefix("torch.")
    return {"dtype": kind, "shape": list(x.shape), "values": values.detach().tolist()}


def _rounded(x: Tensor) -> list[float]:
    return [float(f"{value:.7g}") for value in x.tolist()]


def _spread(x: Tensor) -> dict[str, float]:
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
