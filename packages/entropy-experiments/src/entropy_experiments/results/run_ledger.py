"""Results of `entropy-probe explain`: who changed the entropy and the reward of a whole run.

    summary.json             totals, lines, steps (`RunLedgerResult`)
    run_ledger.parquet       a row per token of every batch, a row group per step
    by_prompt.parquet        the same added up by prompt
    by_token_text.parquet    by the token's text
    by_layer.parquet         by step and module, from products of costate and gradient
    manifest.json            written last: sha256 of each file; a folder with it is finished

The rows of each table add up to `lines.batches` of summary.json. `TABLES` has every column with
its type and meaning.

dH is the change of entropy along the path, in nats of the unit that `entropy.unit` names; dR that
of the expected reward. dH_a and dH_b come from two halves of the evaluation prompts and add up to
dH, so the standard error of a sum of dH over any rows is |sum dH_a - sum dH_b|: one degree of
freedom, enough to tell noise from signal and too few for an interval.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, NotRequired, TypedDict, cast

from entropy_experiments.results.schema import RUN_LEDGER, EstimateResult, JSONObject, Stamp

if TYPE_CHECKING:
    import pyarrow

SUMMARY_FILE, MANIFEST_FILE = "summary.json", "manifest.json"
TOKEN_TABLE, PROMPT_TABLE = "run_ledger.parquet", "by_prompt.parquet"
TEXT_TABLE, LAYER_TABLE = "by_token_text.parquet", "by_layer.parquet"
AGAIN = "Run the same `entropy-probe explain` command again: finished steps are kept."

LINES = ("batches", "decay", "momentum_before_record", "uncovered")
"""Of the ledger, in this order; they add up to `total.path`."""
CHECKED = (
    "no check found another step or gradient than training's, and the total agrees with fresh "
    "rollouts within their error; no single step's change is measured, so errors of steps that "
    "cancel are not seen"
)
"""What a ledger without doubts stands for."""
TOKEN_CLASSES = ("number", "operator", "connective", "format", "end", "space", "word", "other")

Kind = Literal["int64", "double", "string"]


class Column(NamedTuple):
    name: str
    kind: Kind
    meaning: str


_INFLUENCE = (
    Column("dH", "double", "change of entropy, path, nats"),
    Column("dH_a", "double", "its part from the first half of E; dH_a + dH_b = dH"),
    Column("dH_b", "double", "its part from the second half of E"),
    Column("dR", "double", "change of expected reward, path; null without rewards"),
    Column("dR_a", "double", "its part from the first half of E"),
    Column("dR_b", "double", "its part from the second half of E"),
)
_SUMS = (
    Column("dH", "double", "sum of the tokens' dH"),
    Column("dH_stderr", "double", "|sum dH_a - sum dH_b|"),
    Column("dR", "double", "sum of the tokens' dR; null without rewards"),
    Column("dR_stderr", "double", "|sum dR_a - sum dR_b|; null without rewards"),
)
TABLES: dict[str, tuple[Column, ...]] = {
    TOKEN_TABLE: (
        Column("step", "int64", "step that learned from the token; step N starts at checkpoint N"),
        Column("rollout", "int64", "row of the step's batch"),
        Column("uid", "string", "step-rollout, the same in every run of the command"),
        Column("prompt", "string", "first 16 digits of the sha256 of the prompt's tokens"),
        Column("position", "int64", "index in the response, 0 for its first token"),
        Column("token_id", "int64", "token"),
        Column("text", "string", "the token as text"),
        Column("advantage", "double", "as recorded"),
        Column("reward", "double", "of the rollout; null: not recorded"),
        Column("logprob", "double", "at the parameters before the step"),
        Column("entropy", "double", "of the distribution that the token was drawn from"),
        Column("coefficient_logprob", "double", "dL/dl, the loss's derivative by the log-prob"),
        Column("coefficient_entropy", "double", "dL/dh, by the entropy"),
        *_INFLUENCE,
        Column("dH_tangent", "double", "change by the slope before each step; null: not asked for"),
    ),
    PROMPT_TABLE: (
        Column("prompt", "string", "as in run_ledger.parquet"),
        Column("prompt_text", "string", "decoded"),
        Column("solved", "double", "share of rollouts with the batch's full reward; null: unknown"),
        Column("rollouts", "int64", "over all steps"),
        Column("tokens", "int64", "over all steps"),
        *_SUMS,
    ),
    TEXT_TABLE: (
        Column("text", "string", "the token as text"),
        Column("class", "string", f"one of {', '.join(TOKEN_CLASSES)}"),
        Column("count", "int64", "tokens over all steps"),
        *_SUMS,
    ),
    LAYER_TABLE: (
        Column("step", "int64", "as in run_ledger.parquet"),
        Column("layer", "string", "up to the first number of the name: model.layers.3"),
        Column("module", "string", "the layer's own module: self_attn.q_proj"),
        *_SUMS,
    ),
}
"""Every table of a run directory, with its columns."""

Window = TypedDict("Window", {"from": int, "to": int, "steps": int, "every": int})
"""Checkpoints `from` and `to`, the optimizer steps between them, and the distance of the
checkpoints that were read; steps between these were replayed."""


class EntropyEnds(TypedDict):
    """Entropy at both ends, by the fresh rollouts of `measured`."""

    start: EstimateResult
    end: EstimateResult
    unit: str
    """token or sequence."""


class RewardEnds(TypedDict):
    start: EstimateResult
    end: EstimateResult


class RunTotal(TypedDict):
    """Sum of the steps' first-order changes."""

    path: EstimateResult
    """By the mean of the slopes at both ends of each step: third-order error."""
    tangent: EstimateResult | None
    """By the slope before each step; None: not asked for."""
    reward: EstimateResult | None
    """dR along the path; None: no rewards."""


class RunLine(TypedDict):
    dH: float
    stderr: float | None
    dR: float | None
    dR_stderr: float | None


class Unfinished(TypedDict):
    """What the last batches will still do after the window, through momentum: no line of the sum.

    With the last step's slope, learning rate and denominator held and no gradient entering; Adam's
    bias correction goes on.
    """

    dH: float
    dR: float | None


class RunMemo(TypedDict):
    unfinished: Unfinished


class RunStep(TypedDict):
    """One step of the window."""

    step: int
    entropy: float
    """Before the step, on its evaluation rollouts."""
    entropy_stderr: float | None
    reward: float | None
    """Mean reward of the evaluation rollouts before the step."""
    batch_reward: float | None
    """Mean reward of the batch."""
    rollouts: int
    tokens: int
    dH_path: float
    """What happened to the entropy in this step, along the path."""
    dH_tangent: float | None
    dR_path: float | None
    dH_batches: float
    """What this step's batch did in the whole window: now and later, through momentum."""
    dR_batches: float | None
    dH_decay: float
    """The same of this step's weight decay."""
    dR_decay: float | None
    dH_uncovered: float
    dR_uncovered: float | None
    replayed: bool
    """The parameters before this step were recomputed from an earlier checkpoint."""
    gradient_distance: float | None
    """|gradient used - gradient rebuilt| over the rebuilt one's size; null: no moment is stored."""
    step_distance: float
    """|theta_after - theta_before - the rebuilt step| over the size of the step made."""
    clip_factor: float
    lr: float


class Arrival(TypedDict):
    """A replay at the checkpoint where it had to arrive."""

    start: int
    end: int
    distance: float
    """|replayed - stored| over the size of the change between the two checkpoints."""


class RunLedgerResult(Stamp):
    """summary.json of a run's ledger."""

    key: str
    run: str
    window: Window
    entropy: EntropyEnds
    reward: RewardEnds | None
    total: RunTotal
    lines: dict[str, RunLine]
    memo: RunMemo
    measured: EstimateResult
    """Entropy at the end minus entropy at the start, by fresh rollouts."""
    measured_reward: EstimateResult | None
    unexplained: EstimateResult
    """Measured minus `total.path`, on the same prompts."""
    unexplained_reward: EstimateResult | None
    steps: list[RunStep]
    replays: list[Arrival]
    evaluation: JSONObject
    """prompts, rollouts and tokens of the evaluation rollouts of each step."""
    trusted: bool
    why_not: list[str]
    notes: list[str]
    assumed: JSONObject
    provenance: JSONObject
    run_directory: NotRequired[str]


class _Listed(TypedDict):
    sha256: str
    bytes: int


class RunLedgerManifest(Stamp):
    key: str
    files: dict[str, _Listed]


def read_run_ledger(folder: str | Path) -> RunLedgerResult:
    """The summary.json of a finished run directory, checked.

    Args:
        folder: As `entropy-probe explain` wrote it.

    Returns:
        The summary.

    Raises:
        FileNotFoundError: If the folder has no manifest: it is not finished, or no such folder.
        ValueError: If a file is damaged, or of another version.

    Examples:
        >>> read_run_ledger("no_such_folder")
        Traceback (most recent call last):
        FileNotFoundError: ...
    """
    path = Path(folder) / SUMMARY_FILE
    content = json.loads(_listed_bytes(Path(folder), SUMMARY_FILE))
    RUN_LEDGER.check(content, path, advice=AGAIN)
    return cast(RunLedgerResult, content)


def read_ledger_table(
    folder: str | Path, name: str, *, columns: list[str] | None = None
) -> pyarrow.Table:
    """A table of a finished run directory, checked against its manifest.

    Args:
        folder: As `entropy-probe explain` wrote it.
        name: One of `TABLES`.
        columns: Those to read; None: all.

    Returns:
        The table, as pyarrow has it.

    Raises:
        FileNotFoundError: If the folder is not finished.
        ValueError: If the file is damaged, or there is no such table.

    Examples:
        >>> read_ledger_table("no_such_folder", "by_prompt.parquet")
        Traceback (most recent call last):
        FileNotFoundError: ...
    """
    if name not in TABLES:
        raise ValueError(f"Got the table {name!r}; expected one of {', '.join(TABLES)}.")
    data = _listed_bytes(Path(folder), name)

    import io

    import pyarrow.parquet

    return pyarrow.parquet.read_table(io.BytesIO(data), columns=columns)


def is_run_ledger(folder: str | Path) -> bool:
    """Whether a finished ledger of a run is here."""
    path = Path(folder) / MANIFEST_FILE
    if not path.is_file():
        return False
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):  # RecursionError: nested more deeply than any ledger
        return False
    return isinstance(content, dict) and content.get("format") == RUN_LEDGER.name


def _listed_bytes(folder: Path, name: str) -> bytes:
    manifest = cast(
        RunLedgerManifest,
        RUN_LEDGER.read(
            folder / MANIFEST_FILE,
            what="ledger of a run",
            expected=f"the {MANIFEST_FILE} of a finished `entropy-probe explain`",
            advice=AGAIN,
        ),
    )
    path, listed = folder / name, manifest["files"].get(name)
    if listed is None or not path.is_file():
        raise FileNotFoundError(f"No file {path}; expected it in a finished run directory. {AGAIN}")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != listed["sha256"]:
        raise ValueError(
            f"{path} is damaged or was changed: its sha256 is not the one in {MANIFEST_FILE}. "
            f"{AGAIN}"
        )
    return data
