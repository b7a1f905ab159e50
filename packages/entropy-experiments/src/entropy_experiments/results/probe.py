"""Results of `entropy-probe run`: results.json, and the log at any of its levels."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from entropy_experiments.results.schema import (
    PROBE_LOG,
    EstimateResult,
    JSONObject,
    Stamp,
    WeightsResult,
)


class SweepPoint(EstimateResult):
    """The measured change at one step size."""

    eta: float
    diagnostics: WeightsResult


class MadeStep(TypedDict):
    """Whether the step analysed is the one that training made."""

    of_recorded_gradient: bool
    gradient_distance: float | None
    reasons: list[str]
    altered: NotRequired[list[str]]
    other_start: NotRequired[str]
    """Why training's step was not made from the weights of the checkpoint."""


class StepCertificateResult(TypedDict):
    passed: bool
    apart: NotRequired[bool]
    share: float | None
    cosine: float
    relative_error: float


class ProbeCore(Stamp):
    """What results and logs share; numbers of a skipped phase, or of another level, are absent."""

    checkpoint: str
    learning_rate: float
    unit: NotRequired[str]
    """Logs of earlier versions leave it to their configuration."""
    H_orig: float
    B_E: int
    B_U: int
    timing: dict[str, float]
    bars_dot: NotRequired[float]
    deltaH1: NotRequired[float]
    deltaH_true: NotRequired[float]
    H_upd: NotRequired[float]
    avg_reward: NotRequired[float]
    mode: NotRequired[str | None]
    deltaH1_to_go: NotRequired[float]
    curvature_term: NotRequired[float]
    linear_range: NotRequired[float | None]
    diagnostics: NotRequired[WeightsResult]
    sweep: NotRequired[list[SweepPoint]]
    difference: NotRequired[float]
    made_step: NotRequired[MadeStep]
    step_certificate: NotRequired[StepCertificateResult]


class ProbeResult(ProbeCore):
    """results.json of `run`, and what `run_mixed_probe` returns."""

    update: str
    """"recorded", "imported" (the batch names no weights, and no certificate says that the step is
    training's) or "hypothetical". (pyright does not see this name in a base class.)"""
    estimates: dict[str, EstimateResult]
    avg_generation_length: float
    assumed: JSONObject
    not_verifiable: list[str]
    notes: list[str]
    verdict: NotRequired[list[str]]
    log_path: NotRequired[str]


class Spread(TypedDict):
    """How the values of a batch are spread."""

    mean: float
    std: float
    min: float
    median: float
    max: float


class LogBatch(TypedDict):
    """A batch in numbers; advantages, rewards and retries are of the update batch."""

    rollouts: int
    length: Spread
    truncated: float
    advantage: NotRequired[Spread]
    retries: NotRequired[int]
    reward: NotRequired[Spread]


class LogBatches(TypedDict):
    evaluation: LogBatch
    update: LogBatch


class UpdateVectorResult(TypedDict):
    """The rebuilt step in numbers."""

    loss: float
    step: float
    grad_norm: float
    clipped_norm: float
    clip_factor: float
    microbatches: int
    precision: dict[str, str]
    part_norms: dict[str, float]


class RawTensor(TypedDict):
    """A tensor in all its digits; a mask as 0 and 1."""

    dtype: str
    shape: list[int]
    values: Any


class RawResult(TypedDict):
    """The arrays of a debug log, padding and all."""

    evaluation: dict[str, RawTensor]
    update: dict[str, RawTensor]
    loss_gradient: dict[str, RawTensor] | str
    shares: dict[str, dict[str, float]]


class LogRollout(TypedDict):
    """A rollout of a detailed log; a debug log has its tokens, too."""

    prompt_id: int
    prompt: str
    response: str
    tokens: int
    truncated: bool
    logprob: float
    entropy: float
    logweight: NotRequired[float]
    weight: NotRequired[float]
    integrand: NotRequired[float]
    advantage: NotRequired[float]
    reward: NotRequired[float]
    token_ids: NotRequired[list[int]]
    token_logprob: NotRequired[list[float]]
    token_entropy: NotRequired[list[float]]


class ProbeLog(ProbeCore):
    """A log at any of its four levels."""

    update: str
    """"recorded", "imported" (the batch names no weights, and no certificate says that the step is
    training's) or "hypothetical". (pyright does not see this name in a base class.)"""
    level: str
    estimates: NotRequired[dict[str, EstimateResult]]
    avg_generation_length: NotRequired[float]
    assumed: NotRequired[JSONObject]
    not_verifiable: NotRequired[list[str]]
    notes: NotRequired[list[str]]
    batches: NotRequired[LogBatches]
    update_vector: NotRequired[UpdateVectorResult]
    messages: NotRequired[list[str]]
    provenance: NotRequired[JSONObject]
    evaluation_rollouts: NotRequired[list[LogRollout]]
    update_rollouts: NotRequired[list[LogRollout]]
    raw: NotRequired[RawResult]
    nulls: NotRequired[dict[str, str]]


def read_log(path: str | Path) -> ProbeLog:
    """The content of a log, compressed or not.

    Args:
        path: A .json or .json.gz file that `entropy-probe run` wrote.

    Returns:
        The log as a dict.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no log, or of another version.

    Examples:
        >>> import json, tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "entropy_probe_12-00-00_step_13.json"
        ...     _ = path.write_text(json.dumps({"schema": 1, "level": "minimal", "B_E": 64}))
        ...     log = read_log(path)
        >>> log["B_E"]
        64
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"No log {path}; expected a .json or .json.gz file of a run.")
    data = path.read_bytes()
    try:
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (ValueError, OSError, EOFError, RecursionError) as error:
        raise ValueError(
            f"{path} is no log, or cut short ({error}). Run the probe again."
        ) from None
    if not isinstance(content, dict) or "level" not in content:
        raise ValueError(
            f"{path} is no log of `entropy-probe run`; expected its entropy_probe_*.json or "
            ".json.gz, not the summary beside it."
        )
    PROBE_LOG.check(
        content, path, advice="Run the probe again, or read it with the version that wrote it."
    )
    return content  # pyright: ignore[reportReturnType]  # JSON, whose schema was checked


def newest_log(folder: str | Path) -> Path | None:
    """The last log below a folder that `entropy-probe run --out` or its `logs` was; or None."""
    logs = [log for top in ("logs", ".") for log in logs_below(Path(folder) / top)]
    return max(logs, key=_written, default=None)


def _written(log: Path) -> tuple[str, str, int, list[int]]:
    """Date and time of the name, which copying keeps; within a second, the file's own time."""
    clock = log.name.removeprefix("entropy_probe_")[: len("HH-MM-SS")]
    counts = [int(digits) for digits in re.findall(r"\d+", log.name)]  # -10 comes after -2
    return (log.parent.name, clock, log.stat().st_mtime_ns, counts)


def logs_below(directory: Path) -> list[Path]:
    """Under their dates, in no order."""
    return [
        path
        for path in directory.glob("*/entropy_probe_*.json*")
        if path.name.endswith((".json", ".json.gz")) and not path.name.endswith("_summary.json")
    ]
