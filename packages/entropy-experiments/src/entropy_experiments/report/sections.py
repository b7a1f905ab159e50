"""The sections of a report: what the pages, figures and tables of a run are drawn from.

`html.data.gather` makes a `ReportData` of any result. A section that the run has no data for is
None, and `absent` says why.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, NotRequired, TypedDict

from entropy_experiments.report.training import TrainingSteps
from entropy_experiments.results import (
    AnyNumber,
    Budget,
    EstimateResult,
    JSONObject,
    LeftOut,
    Number,
    TrajectoryResult,
    WhatIf,
    WhatIfAnswer,
    WhatIfPrediction,
)

Steps = TrajectoryResult | TrainingSteps
"""A run over its steps: of checkpoints, or of a probed training."""
RunKind = Literal["probe", "measure", "influence", "trajectory", "training"]


class Verdict(TypedDict):
    """The answer in a sentence, what supports it, and how far to trust it."""

    sentence: str
    points: list[str]
    trusted: bool | None
    doubts: list[str]
    text: list[str]


class CurvePoint(TypedDict):
    """A measured change at one step size."""

    eta: float
    value: float
    stderr: float | None
    interval: list[float] | None
    noise_floor: float | None
    trusted: bool | None
    why_not: list[str] | None


class Curve(TypedDict):
    """Changes over the step size."""

    lr: float
    predicted: AnyNumber | None
    curvature: AnyNumber | None
    points: list[CurvePoint]
    linear_range: float | None
    unsure: bool
    noise_floor: float | None


class BookRow(TypedDict):
    """A bar of a waterfall; it begins where the one before ended."""

    name: str
    kind: Literal["line", "total", "rest"]
    start: float
    value: float
    eventual: float | None
    stderr: float | None
    interval: list[float] | None


class Book(TypedDict):
    """A ledger as rows from first to last, in units of 10**power."""

    name: str
    unit: str
    power: int
    rows: list[BookRow]
    notes: NotRequired[list[str]]


class BookLine(TypedDict):
    name: str
    kind: str


class LedgerSection(TypedDict):
    """Ledgers side by side."""

    books: list[Book]
    lines: list[BookLine]


class MomentumToken(TypedDict):
    """A token of an earlier batch, with the text around it."""

    before: str
    text: str
    after: str
    rollout: int
    position: int
    value: float
    stderr: float
    """From two halves of the evaluation prompts."""


class MomentumBatchRow(TypedDict):
    """What an earlier batch does in this step."""

    step: int
    value: float
    stderr: float | None
    weight: float
    other_gradient: bool
    tokens: list[MomentumToken]


class MomentumSection(TypedDict):
    total: float
    rows: list[MomentumBatchRow]


class WeightsRow(TypedDict):
    """Importance weights at one step size."""

    eta: float
    ESS: float | None
    ESS_fraction: float | None
    k_hat: float | None
    w_max: float | None
    w_min: float | None
    kl: float | None
    clip_fraction: float | None
    trusted: bool | None
    why_not: list[str]


class RolloutRow(TypedDict):
    """The influence of one update rollout."""

    rollout: int
    value: float
    tokens: int
    stderr: NotRequired[float | None]
    stable: NotRequired[bool]


class RolloutsSection(TypedDict):
    rows: list[RolloutRow]


class CovarianceCells(TypedDict):
    """Sums over cells of probability and advantage."""

    probability: list[str]
    advantage: list[str]
    influence: list[list[float]]
    tokens: list[list[int]]


class CovarianceSection(TypedDict):
    points: dict[str, list[float]]
    tokens: int
    drawn: int
    cells: CovarianceCells


class WhatIfSection(TypedDict):
    asked: list[WhatIf]
    without: list[LeftOut]
    budget: Budget | None
    measured: AnyNumber


class MatrixSection(TypedDict):
    """Contributions of pairs of rollouts, perhaps summed in blocks."""

    values: list[list[float]]
    blank: str
    rows: list[int]
    columns: list[int]
    block: list[int]
    shape: list[int]
    eta: float


class RolloutText(TypedDict):
    """An update rollout: as text, or as tokens with their numbers (`html.token_views`)."""

    i: int
    uid: NotRequired[str | None]
    n: int
    prompt: int
    p: int
    reward: float | None
    advantage: float | None
    truncated: NotRequired[bool]
    text: NotRequired[str]
    influence: NotRequired[float]
    gaps: NotRequired[dict[str, str]]
    t: NotRequired[list[int]]
    l: NotRequired[list[int]]  # noqa: E741  # short: a page has a hundred thousand
    h: NotRequired[list[int]]
    a: NotRequired[int | list[int]]
    v: NotRequired[list[int]]
    e: NotRequired[list[int]]
    s: NotRequired[str]


class TextsSection(TypedDict):
    """The update rollouts; of a study with every token's influence."""

    prompts: list[str]
    rollouts: list[RolloutText]
    tokens: int
    without_tokens: int
    vocabulary: NotRequired[list[str]]
    units: NotRequired[dict[str, float]]
    scale: NotRequired[float]
    folds: NotRequired[int]
    t: NotRequired[float | None]


class AssumedSection(TypedDict):
    assumed: JSONObject
    not_verifiable: list[str]
    notes: list[str]


class EnvironmentSection(TypedDict):
    """Where the numbers come from."""

    facts: dict[str, str]
    versions: JSONObject
    config: str | None


class OtherBatch(TypedDict):
    """Another evaluation batch of the same study."""

    name: str
    kind: str
    rollouts: int
    prompts: int
    level: AnyNumber
    predicted: AnyNumber
    measured: AnyNumber


class ReportData(TypedDict):
    """All that a report shows."""

    kind: RunKind
    title: str
    checkpoint: str
    source: str
    key: str | None
    unit: str
    level: AnyNumber | None
    predicted: AnyNumber | None
    measured: AnyNumber | None
    verdict: Verdict
    curve: Curve | None
    ledger: LedgerSection | None
    momentum: MomentumSection | None
    weights: list[WeightsRow] | None
    rollouts: RolloutsSection | None
    texts: TextsSection | None
    covariance: CovarianceSection | None
    what_if: WhatIfSection | None
    matrix: MatrixSection | None
    assumed: AssumedSection | None
    environment: EnvironmentSection | None
    others: list[OtherBatch]
    absent: dict[str, str]
    lr: NotRequired[float]
    difference: NotRequired[AnyNumber | None]
    sizes: NotRequired[dict[str, int]]
    seconds: NotRequired[float | None]
    trajectory: NotRequired[Steps | None]


class Answer(NamedTuple):
    """A what-if that has an answer."""

    name: str
    prediction: WhatIfPrediction
    measured: EstimateResult | None
    """Of the step as it was made anew, if it was."""


def answered(section: WhatIfSection) -> list[Answer]:
    """What-ifs with an answer, in the order of the questions."""
    return [
        Answer(one["name"], one["prediction"], measured_again(one))
        for one in section["asked"]
        if "error" not in one
    ]


def measured_again(answer: WhatIfAnswer) -> EstimateResult | None:
    """What the step of a what-if did when it was made; None: it was not."""
    confirmation = answer.get("confirmation")
    return None if confirmation is None or "error" in confirmation else confirmation["measured"]


def as_number(value: float) -> Number:
    """A number of whose error bar nothing is known."""
    return {"value": value, "interval": None}
