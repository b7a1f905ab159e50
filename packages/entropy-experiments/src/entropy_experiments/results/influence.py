"""Results of `entropy-probe influence`: summary.json of a study."""

from __future__ import annotations

from typing import NotRequired, TypedDict, final

from entropy_experiments.results.schema import EstimateResult, JSONObject, MeasuredResult, Stamp


class LedgerLine(TypedDict):
    """What one term of the step did."""

    this_step: float
    eventual: NotRequired[float | None]
    stderr: NotRequired[float | None]
    interval: NotRequired[list[float] | None]
    trusted: NotRequired[bool]
    why_not: NotRequired[list[str]]


class LedgerResult(TypedDict):
    """The terms of a change, their sum, what curvature adds, and what was measured."""

    quantity: NotRequired[str]
    lines: dict[str, LedgerLine]
    predicted: EstimateResult
    curvature: EstimateResult | None
    measured: EstimateResult
    unexplained: EstimateResult | None
    predicted_by_prompt: NotRequired[EstimateResult | None]
    notes: list[str]


class Ledgers(TypedDict):
    entropy: LedgerResult
    reward: NotRequired[LedgerResult | None]


class GroupResult(TypedDict):
    """Influence of a group of tokens."""

    value: float
    tokens: int
    stderr: NotRequired[float | None]
    stable: NotRequired[bool]


class RankedToken(TypedDict):
    """A token in its context."""

    value: float
    stderr: float | None
    rollout: int
    position: int
    k: int
    token: int
    text: str
    before: str
    after: str
    probability: float
    advantage: float


class Cancellation(TypedDict):
    ratio: float | None
    withheld: bool


class WhatIfPrediction(TypedDict):
    """What another loss or batch would have done, to first order."""

    total: float
    change: float
    gradient: float
    baseline: dict[str, float]
    recorded: float
    stderr: float | None
    change_stderr: NotRequired[float | None]
    lr: float
    changed_tokens: int
    notes: NotRequired[list[str]]


@final
class Unanswered(TypedDict):
    """Why a question has no answer."""

    error: str


@final
class ConfirmationAnswer(TypedDict):
    """The step of a what-if, made and measured."""

    frozen: EstimateResult
    recomputed: EstimateResult
    measured: EstimateResult
    rest: EstimateResult
    agrees: bool | None
    curvature: NotRequired[EstimateResult | None]
    change: NotRequired[EstimateResult]
    effect: NotRequired[str | None]
    effect_agrees: NotRequired[bool | None]
    explained: NotRequired[dict[str, EstimateResult]]
    clip_factors: NotRequired[list[float]]
    accounted: NotRequired[bool | None]
    beyond_linear: NotRequired[bool | None]
    confirmed: NotRequired[bool | None]
    text: NotRequired[str]
    clip_c: NotRequired[float | None]


Confirmation = ConfirmationAnswer | Unanswered


@final
class WhatIfAnswer(TypedDict):
    name: str
    prediction: WhatIfPrediction
    confirmation: NotRequired[Confirmation | None]
    text: NotRequired[str]


@final
class WhatIfUnanswered(TypedDict):
    name: str
    error: str


WhatIf = WhatIfAnswer | WhatIfUnanswered


@final
class LeftOutAnswer(TypedDict):
    """The step made anew without a rollout."""

    rollout: int
    first_order: EstimateResult
    measured: EstimateResult
    difference: EstimateResult
    influence: float
    label: NotRequired[str]
    clip_factor: NotRequired[float]


@final
class LeftOutUnanswered(TypedDict):
    rollout: int
    error: str


LeftOut = LeftOutAnswer | LeftOutUnanswered


@final
class BudgetAnswer(TypedDict):
    """The learning rate that changes the entropy by `budget`."""

    budget: float
    linear: float
    curved: float | None
    linear_range: NotRequired[float | None]
    curvature_known: NotRequired[bool]
    notes: NotRequired[list[str]]
    text: NotRequired[str]


@final
class BudgetUnanswered(TypedDict):
    budget: float
    error: str


Budget = BudgetAnswer | BudgetUnanswered


class Contributor(TypedDict):
    rollout: int
    value: float


class MovedRollout(TypedDict):
    """The log-prob change of an evaluation rollout, and who made most of it."""

    rollout: int
    predicted: float
    measured: float
    contributors: list[Contributor]


@final
class FisherAnswer(TypedDict):
    """The kernel's prediction of log-prob changes beside the measured ones."""

    eta: float
    correlation: float | None
    relative_gap: float | None
    moved: list[MovedRollout]
    centred: NotRequired[bool]


FisherResult = FisherAnswer | Unanswered


class MomentumShare(TypedDict):
    """A part of the ledger's line "momentum"; its error is over evaluation prompts."""

    dH: float
    stderr: float | None
    interval: list[float] | None


class MomentumBatch(MomentumShare):
    """What an earlier batch did in this step, through momentum."""

    step: int
    weight: float
    """(1 - b1) b1^(t - s), by which its gradient enters this step."""
    decay: float
    """Coupled decay of its step."""
    step_distance: float
    gradient_distance: float | None
    """|gradient used - gradient rebuilt| over the rebuilt one's size; null: no moment is stored."""
    other_gradient: bool
    """It is too large: this is not the gradient that training used."""


MomentumPart = TypedDict(
    "MomentumPart",
    {"from": int, "to": int, "dH": float, "stderr": float | None, "interval": list[float] | None},
)
"""The batches of steps `from` to `to` together."""

MomentumAnswer = TypedDict(
    "MomentumAnswer",
    {
        "from": int,
        "to": int,
        "total": float,
        "batches": list[MomentumBatch],
        "parts": list[MomentumPart],
        "before_record": MomentumShare,
        "decay": float,
        "uncovered": float,
    },
)
"""The ledger's line "momentum", by the batches that it came from, the newest first; in `parts` the
newest are together, which hold half of the weight, and the others. They, `before_record`, `decay`
(coupled, of earlier steps) and `uncovered` add up to `total`, the line. `from` is the first step
whose batch was rebuilt. momentum.parquet has their tokens."""

MomentumResult = MomentumAnswer | Unanswered


class EstimandResult(TypedDict, total=False):
    unit: str
    temperature: float
    form: str


class TableFacts(TypedDict, total=False):
    """What a token table does not say in its columns."""

    share_K: list[float]


class AggregateResult(TypedDict):
    """The change at one step size: measured along the whole step and its baseline, and summed."""

    full: MeasuredResult
    baseline: MeasuredResult
    first_order: float
    first_order_baseline: float
    first_order_gradient: float
    grad_sum_measured: float | None
    reconstruction_error: float | None


class EvaluationBatch(TypedDict):
    """One evaluation batch of a study."""

    name: str
    kind: str
    rollouts: int
    prompts: int
    tokens: int
    level: EstimateResult
    aggregate: dict[str, AggregateResult]
    ledger: Ledgers
    groups: dict[str, dict[str, GroupResult]]
    ranked: dict[str, list[RankedToken]]
    reliability: float | None
    rollout_reliability: float | None
    cancellation: Cancellation
    doubts: list[str]
    notes: list[str]
    estimand: NotRequired[EstimandResult]
    params: NotRequired[JSONObject]
    mean_reward: NotRequired[float | None]
    fingerprint: NotRequired[str]
    reconstruction: NotRequired[JSONObject]
    measured_rollouts: NotRequired[list[int]]
    leave_one_out: NotRequired[list[LeftOut]]
    fisher: NotRequired[FisherResult | None]
    momentum: NotRequired[MomentumResult | None]
    what_if: NotRequired[list[WhatIf]]
    entropy_budget: NotRequired[Budget | None]
    table: NotRequired[TableFacts]


class Certified(TypedDict, total=False):
    """How far the rebuilt step is from the one that training made; empty: nobody made it."""

    gradient_distance: float | None
    step_distance: float
    certificate: str
    """The same in words, as `entropy-probe run` prints it."""
    unchecked: str
    another_step: str


class StepResult(TypedDict):
    """The rebuilt step."""

    norms: dict[str, float]
    loss: float
    precision: dict[str, str]
    clip_factor: float
    certified: NotRequired[Certified]


class UpdateResult(TypedDict):
    """The update batch of a study."""

    rollouts: int
    tokens: int
    prompts: int
    real: bool
    mean_reward: float | None
    objective: JSONObject
    clip_factor: float
    norms: dict[str, float]
    loss: float
    certified: NotRequired[Certified]
    fingerprint: str


class InfluenceResult(Stamp):
    """summary.json of an influence study."""

    key: str
    checkpoint: str
    step: int | None
    base: str
    lr: float
    momentum_decay: float
    coupled_decay: bool
    etas: list[float]
    per_sequence_etas: list[float]
    reference_eta: float
    mode: str
    clip_c: float | None
    plan: JSONObject
    update: UpdateResult
    aggregate: dict[str, AggregateResult]
    ledger: LedgerResult
    evaluations: list[EvaluationBatch]
    notes: list[str]
    assumed: JSONObject
    not_verifiable: list[str]
    timings: dict[str, float]
    provenance: JSONObject
    absent: NotRequired[dict[str, str]]
    """Parts that this study cannot have, and why: those of a model cut over the processes."""
    run_directory: NotRequired[str]


class UpdateText(TypedDict):
    """A row of update_rollouts.json."""

    rollout: int
    uid: NotRequired[str | None]
    prompt: int
    prompt_text: str
    reward: float | None
    truncated: NotRequired[bool]
    gaps: NotRequired[dict[str, str]]
    """Text that the policy did not write, by the index of the response token that follows."""
