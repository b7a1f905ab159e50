"""The versioned schema of results: what commands write, and what the report reads.

Every result names its schema and the version of it:

    {"format": "entropy_experiments.measurements", "schema": 1, ...}

    command                 file                                schema
    entropy-probe run       results.json                        PROBE
                            logs/DATE/entropy_probe_*.json.gz   PROBE_LOG
    entropy-probe measure   results.json                        MEASUREMENTS
    entropy-probe influence summary.json, manifest.json         INFLUENCE
    entropy-probe evaluate  evaluation.json                     EVALUATION
    write_trajectory        trajectory.json                     TRAJECTORY
    a probed training       entropy_probe.jsonl, a row a step   TRAINING_ROW
    entropy-probe train     train_summary.json                  TRAINING

A version is raised when a reader of the one before would misread the file; a new key raises
nothing. `Schema.check` refuses a version that this program does not know. Files that were written
before a schema had its name in them are read as its first version.

The types below are the JSON values themselves: a key that may be absent is `NotRequired`, a number
that may not exist is `None`. `docs/file_formats.md` says what each number is. Without torch: to
read a result is quick.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, final

if TYPE_CHECKING:
    from entropy_experiments.types import Estimate

JSONObject = dict[str, Any]
"""A JSON object whose keys no schema names: settings of other programs, plans, provenance."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The name and the version of a result's layout."""

    name: str
    version: int
    first_nameless: bool = False
    """Files of version 1 did not say their name, or neither name nor version."""

    @property
    def stamp(self) -> Stamp:
        """The keys that every result of this schema begins with."""
        return {"format": self.name, "schema": self.version}

    def check(self, content: Mapping[str, object], path: str | Path, *, advice: str) -> None:
        """Raise ValueError unless `content` is of this schema, in the version read here.

        Args:
            content: The JSON object of a file.
            path: Where it was read.
            advice: What to do about it, as a sentence.
        """
        name, version = content.get("format"), content.get("schema")
        if self.first_nameless:
            name, version = name or self.name, 1 if version is None else version
        if (name, version) == (self.name, self.version):
            return
        newer = isinstance(version, int) and version > self.version and name == self.name
        if newer:
            advice = f"A newer version of entropy-experiments wrote it: upgrade. Or: {advice}"
        raise ValueError(
            f"{path} has format {content.get('format')!r}, schema {content.get('schema')!r}; "
            f"this version reads {self.name!r}, schema {self.version}. {advice}"
        )


PROBE = Schema(name="entropy_experiments.probe", version=1, first_nameless=True)
PROBE_LOG = Schema(name="entropy_experiments.probe_log", version=1, first_nameless=True)
MEASUREMENTS = Schema(name="entropy_experiments.measurements", version=1)
INFLUENCE = Schema(name="entropy_experiments.influence", version=2)
"""2: measured changes are shared among evaluation rollouts as the first-order matrix is."""
EVALUATION = Schema(name="entropy_experiments.evaluation", version=1)
TRAJECTORY = Schema(name="entropy_experiments.checkpoints.runs", version=1)
"""The name is that of the module which wrote the first of these files."""
TRAINING_ROW = Schema(name="entropy_experiments.training_row", version=1, first_nameless=True)
TRAINING = Schema(name="entropy_experiments.training", version=1, first_nameless=True)


class Stamp(TypedDict):
    """What every result says of itself."""

    format: str
    schema: int


# An estimate, and the importance weights behind it.


class Number(TypedDict):
    """A value, with as much of its error bar as its source knows."""

    value: float
    interval: list[float] | None
    stderr: NotRequired[float | None]
    bias: NotRequired[float | None]
    noise_floor: NotRequired[float | None]
    k_hat: NotRequired[float | None]
    trusted: NotRequired[bool | None]
    why_not: NotRequired[list[str]]


class EstimateResult(TypedDict):
    """An `Estimate`, complete."""

    value: float
    interval: list[float] | None
    stderr: float | None
    bias: float | None
    noise_floor: float | None
    k_hat: float | None
    trusted: bool
    why_not: list[str]


AnyNumber = Number | EstimateResult


class WeightsResult(TypedDict):
    """Importance weights of a measured change."""

    ESS: float
    ESS_fraction: float
    w_max: float
    w_min: float
    clip_fraction: float
    k_hat: float | None
    kl: float
    samples_needed: float | None
    rollouts: NotRequired[int]


class MeasuredResult(EstimateResult):
    """A measured change of a study: an estimate and its weights in one object."""

    ESS: float
    ESS_fraction: float
    w_max: float
    w_min: float
    clip_fraction: float
    kl: float
    samples_needed: float | None


def numbers(estimate: Estimate) -> EstimateResult:
    """An estimate as JSON: never NaN, null where there is no such number."""
    return {
        "value": estimate.value,
        "stderr": finite(estimate.stderr),
        "interval": None if estimate.interval is None else list(estimate.interval),
        "bias": finite(estimate.bias),
        "noise_floor": finite(estimate.noise_floor),
        "k_hat": finite(getattr(estimate.diagnostics.get("weights"), "k_hat", None)),
        "trusted": estimate.trusted,
        "why_not": list(estimate.why_not),
    }


def weights_of(change: Estimate) -> WeightsResult:
    """The importance weights behind a measured change."""
    weights = change.diagnostics["weights"]
    return {
        "ESS": weights.ess,
        "ESS_fraction": weights.ess_fraction,
        "w_max": weights.w_max,
        "w_min": weights.w_min,
        "clip_fraction": weights.clip_fraction,
        "k_hat": finite(weights.k_hat),
        "kl": weights.kl,
        "samples_needed": finite(weights.samples_needed),
    }


def finite(x: float | None) -> float | None:
    """JSON has no infinity and no NaN."""
    return x if x is not None and math.isfinite(x) else None


DIFFERENTIATED = {
    "double_backward": "by two backward passes: the model has no forward mode",
    "reverse": "by one gradient, without error bars",
    "central": "by one gradient, with the spread of differences for error bars",
}
"""Forward mode is the rule, and not worth a line."""


# entropy-probe run


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
    """"recorded" or "hypothetical". (pyright does not see this name in a base class.)"""
    estimates: dict[str, EstimateResult]
    avg_generation_length: float
    assumed: JSONObject
    not_verifiable: list[str]
    notes: list[str]
    verdict: NotRequired[list[str]]
    log_path: NotRequired[str]


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
    """"recorded" or "hypothetical". (pyright does not see this name in a base class.)"""
    level: str
    estimates: NotRequired[dict[str, EstimateResult]]
    avg_generation_length: NotRequired[float]
    assumed: NotRequired[JSONObject]
    not_verifiable: NotRequired[list[str]]
    notes: NotRequired[list[str]]
    batches: NotRequired[JSONObject]
    update_vector: NotRequired[JSONObject]
    messages: NotRequired[list[str]]
    provenance: NotRequired[JSONObject]
    evaluation_rollouts: NotRequired[list[LogRollout]]
    update_rollouts: NotRequired[list[LogRollout]]
    raw: NotRequired[JSONObject]
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


# entropy-probe measure


class MeasuredPoint(TypedDict):
    """One repeat at one step size; what was not computed is absent."""

    eta: float
    measured: NotRequired[EstimateResult]
    linear: NotRequired[EstimateResult]
    linquad: NotRequired[EstimateResult]
    diagnostics: NotRequired[WeightsResult]
    differences: NotRequired[dict[str, EstimateResult]]
    clips: NotRequired[dict[str, JSONObject]]


class Repeat(TypedDict):
    """One repeat: fresh batches, and every step size on them."""

    seed: int
    update: str
    B_E: int
    B_U: int
    evaluation_rollouts: str
    update_rollouts: str
    H_orig: EstimateResult
    points: list[MeasuredPoint]
    notes: list[str]
    seconds: float


class RepeatMean(TypedDict):
    """A number over the repeats."""

    mean: float
    stderr: float | None
    interval: list[float] | None
    repeats: int
    trusted: int
    """How many of them are."""


class MeanPoint(TypedDict):
    """Every number at one step size, over the repeats."""

    eta: float
    measured: NotRequired[RepeatMean]
    linear: NotRequired[RepeatMean]
    linquad: NotRequired[RepeatMean]
    differences: dict[str, RepeatMean]
    clips: dict[str, RepeatMean]


class MeasurementsResult(Stamp):
    """results.json of `measure`."""

    unit: str
    checkpoint: str
    learning_rate: float
    plan: JSONObject
    repeats: list[Repeat]
    summary: list[MeanPoint]
    config: JSONObject
    provenance: JSONObject
    results_path: str


MEASUREMENTS_FILE = "results.json"
MEASURE_AGAIN = "Run `entropy-probe measure` again: finished repeats are kept."


def measurements_file(run: Path) -> Path | None:
    """The file of a folder that `measure --out` wrote, or the file itself; None: no such file."""
    path = run / MEASUREMENTS_FILE if run.is_dir() else run
    if not path.is_file() or path.suffix != ".json":
        return None
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        if run.is_dir():
            raise ValueError(f"{path} is not JSON ({error}). {MEASURE_AGAIN}") from error
        return None  # whoever reads it as something else says what is wrong with it
    named = isinstance(content, dict) and content.get("format") == MEASUREMENTS.name
    return path if named else None


def read_measurements(path: str | Path) -> MeasurementsResult:
    """The results of `entropy-probe measure`."""
    path = Path(path)
    content = json.loads(path.read_bytes())
    MEASUREMENTS.check(content, path, advice=MEASURE_AGAIN)
    return content


# entropy-probe influence


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


class EstimandResult(TypedDict, total=False):
    unit: str
    temperature: float
    form: str


class TableFacts(TypedDict, total=False):
    """What a token table does not say in its columns."""

    share_K: list[float]


class EvaluationBatch(TypedDict):
    """One evaluation batch of a study."""

    name: str
    kind: str
    rollouts: int
    prompts: int
    tokens: int
    level: EstimateResult
    aggregate: dict[str, JSONObject]
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
    what_if: NotRequired[list[WhatIf]]
    entropy_budget: NotRequired[Budget | None]
    table: NotRequired[TableFacts]


class Certified(TypedDict, total=False):
    unchecked: str
    step_distance: float | None


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
    aggregate: dict[str, JSONObject]
    ledger: LedgerResult
    evaluations: list[EvaluationBatch]
    notes: list[str]
    assumed: JSONObject
    not_verifiable: list[str]
    timings: dict[str, float]
    provenance: JSONObject
    run_directory: NotRequired[str]


class UpdateText(TypedDict):
    """A row of update_rollouts.json."""

    rollout: int
    prompt_text: str
    truncated: NotRequired[bool]
    gaps: NotRequired[list[int]]


# entropy-probe evaluate


class HighEntropyToken(TypedDict):
    token: str
    mean_entropy: float
    count: int


class EvaluatedCheckpoint(TypedDict):
    """One checkpoint on the task."""

    label: str
    step: int | None
    kind: str
    base: str
    files: dict[str, str]
    high_entropy_tokens: list[HighEntropyToken]
    seconds: float
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

    dataset: str
    split: str | None
    prompts: int
    samples: int
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int
    rewards: list[str]
    threshold: float


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


# A run over its steps: trajectory.json, and the rows of a probed training.

Change = Literal["predicted", "second_order", "measured"]
CHANGES: tuple[Change, ...] = ("predicted", "second_order", "measured")
TOTALS: tuple[Change | Literal["fresh"], ...] = (*CHANGES, "fresh")


class TrajectoryStepResult(TypedDict):
    """One step: the entropy before it, its changes, and their sums up to here."""

    step: int
    level: Number | None
    predicted: Number | None
    second_order: NotRequired[Number | None]
    measured: Number | None
    predicted_sum: Number | None
    second_order_sum: NotRequired[Number | None]
    measured_sum: Number | None
    reward: float | None


class TrajectoryTotal(TypedDict):
    """From the first checkpoint to the last."""

    predicted: Number | None
    second_order: NotRequired[Number | None]
    measured: Number | None
    fresh: Number


class TrajectoryResult(Stamp):
    """trajectory.json."""

    unit: str
    steps: list[TrajectoryStepResult]
    last: Number
    total: TrajectoryTotal


class TrainingRow(Stamp):
    """A row of entropy_probe.jsonl: one probed step, `null` where a number does not exist."""

    step: int
    policy: NotRequired[str]
    sampling: NotRequired[list[str]]
    entropy: float | None
    entropy_low: NotRequired[float | None]
    entropy_high: NotRequired[float | None]
    predicted: float | None
    predicted_low: NotRequired[float | None]
    predicted_high: NotRequired[float | None]
    second_order: NotRequired[float | None]
    second_order_low: NotRequired[float | None]
    second_order_high: NotRequired[float | None]
    second_miss: NotRequired[float | None]
    second_miss_low: NotRequired[float | None]
    second_miss_high: NotRequired[float | None]
    measured: float | None
    measured_low: NotRequired[float | None]
    measured_high: NotRequired[float | None]
    bend: NotRequired[float | None]
    bend_low: NotRequired[float | None]
    bend_high: NotRequired[float | None]
    direct: NotRequired[float | None]
    state: NotRequired[float | None]
    baseline: NotRequired[float | None]
    baseline_share: NotRequired[float | None]
    linear_range: NotRequired[float | None]
    ess: NotRequired[float | None]
    k_hat: NotRequired[float | None]
    kl: NotRequired[float | None]
    lr: NotRequired[float | None]
    grad_norm: NotRequired[float | None]
    param_norm: NotRequired[float | None]
    step_norm: NotRequired[float | None]
    step_mismatch: NotRequired[float | None]
    skipped: NotRequired[float]
    trusted: float
    rollouts: NotRequired[int]
    probed_steps: int
    overhead: float
    why_not: NotRequired[list[str]]
    missing: NotRequired[dict[str, str]]


ROWS_FILE = "entropy_probe.jsonl"


def read_trajectory(path: str | Path) -> TrajectoryResult:
    """A trajectory.json, checked; it has one step or more."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"No file {path}; expected a trajectory.json as write_trajectory makes it."
        )
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}). Write it again.") from error
    if not isinstance(content, dict) or content.get("format") != TRAJECTORY.name:
        raise ValueError(
            f"{path} is no trajectory; expected format {TRAJECTORY.name!r}. Give another file."
        )
    TRAJECTORY.check(content, path, advice="Write it again.")
    if not content.get("steps"):
        raise ValueError(f"{path} has no steps; expected one step or more. Write it again.")
    return content  # pyright: ignore[reportReturnType]  # JSON, whose schema was checked


def read_rows(path: str | Path) -> list[TrainingRow]:
    """Rows of a probed training in the order of steps; what a resume left behind is left out.

    A last line without its end is being written at this moment, and not read.
    """
    path, rows = Path(path), []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=lambda _: None)
        except ValueError as error:
            if number == len(lines):
                continue
            raise ValueError(
                f"Line {number} of {path} is not JSON ({error}). Remove the line: it was cut short."
            ) from error
        if not isinstance(row, dict) or not {"step", "entropy", "predicted"} <= row.keys():
            raise ValueError(
                f"Line {number} of {path} is no row of a probed training; expected the {ROWS_FILE} "
                "of `entropy-probe train` or EntropyProbeCallback."
            )
        TRAINING_ROW.check(
            row, f"Line {number} of {path}", advice="Read it with the version that wrote it."
        )
        rows.append(row)
    return last_branch(rows)


def last_branch(rows: Iterable[TrainingRow]) -> list[TrainingRow]:
    """Where a resume begins again at an earlier step, all rows from there on are of another run."""
    kept: list[TrainingRow] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


# entropy-probe train


class Ends(TypedDict):
    """Means of the first and of the last `rows` of all `of` rows."""

    first: float | None
    last: float | None
    rows: int
    of: int


class TrainingProbe(TypedDict):
    """What the probe of a training left."""

    rows: str
    record: str | None
    probed_steps: int
    predicted: float
    measured: float
    overhead: float | None
    ledgers: list[str]
    noise_scale: str | None
    off: str | None


@final
class TrainingResult(Stamp):
    """train_summary.json."""

    folder: str
    steps: int
    steps_now: int
    max_steps: int
    resumed_from: str | None
    seconds: float
    loss: float | None
    logging_steps: int
    reward: Ends
    entropy: Ends
    checkpoints: list[str]
    replayable: str | None
    config: str
    doctor: JSONObject
    probe: TrainingProbe | None


@final
class TrainingUnchanged(Stamp):
    """A resume that asks for no more steps than are made."""

    folder: str
    steps: int
    steps_now: int
    max_steps: int
    resumed_from: str | None
    nothing_to_do: bool
