"""Results of `entropy-probe evaluate`: evaluation.json."""

from __future__ import annotations

from pathlib import Path
from typing import NotRequired, TypedDict, cast

from entropy_experiments.results.schema import EVALUATION, EstimateResult, JSONObject, Stamp

EVALUATION_FILE = "evaluation.json"


class HighEntropyToken(TypedDict):
    token: str
    id: int
    count: int
    mean_entropy: float
    share_of_entropy: float


class CheckpointFacts(TypedDict):
    """What an evaluation keeps of a checkpoint beside its rows."""

    label: str
    step: int | None
    kind: str
    base: str
    files: dict[str, str]
    high_entropy_tokens: list[HighEntropyToken]
    seconds: float


class EvaluatedCheckpoint(CheckpointFacts):
    """One checkpoint on the task."""

    rows: str
    measures: dict[str, EstimateResult]
    length_quantiles: dict[str, float]


EvaluatedDifference = TypedDict(
    "EvaluatedDifference",
    {"label": str, "from": str, "measures": dict[str, EstimateResult]},
)
"""Changes from the checkpoint `from`, on the same prompts."""


class EvaluationSettings(TypedDict):
    """What every checkpoint of an evaluation was asked."""

    schema: int
    dataset: str
    split: str | None
    problems: str
    """Hash of the prompts and their answers."""
    prompts: int
    samples: int
    seed: int
    chat_template: bool
    temperature: float
    top_p: float
    max_new_tokens: int
    stop: list[str]
    rewards: dict[str, str | None]
    """By name the hash of its code; null: a function of this package."""
    threshold: float
    dtype: str
    sharding: NotRequired[str]
    """Of a model that was cut over the processes."""


class EvaluationResult(Stamp):
    """evaluation.json."""

    folder: str
    settings: EvaluationSettings
    k: list[int]
    notes: list[str]
    provenance: JSONObject
    checkpoints: list[EvaluatedCheckpoint]
    differences: list[EvaluatedDifference]
    plot: NotRequired[str | None]


def read_evaluation(run: str | Path) -> EvaluationResult:
    """The evaluation.json of a folder, or the file itself, checked."""
    path = Path(run) / EVALUATION_FILE if Path(run).is_dir() else Path(run)
    content = EVALUATION.read(
        path,
        what="evaluation",
        expected=f"the {EVALUATION_FILE} of `entropy-probe evaluate`",
        advice="Run `entropy-probe evaluate` again: finished checkpoints are kept.",
    )
    return cast(EvaluationResult, content)
