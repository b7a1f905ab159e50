"""Sections that say what is computed, and with which memory and precision."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from entropy_experiments.config.aliases import shown
from entropy_experiments.config.fields import (
    Count,
    Countable,
    Dtype,
    Many,
    Names,
    Number,
    Path,
    Positive,
    Section,
    Some,
    TorchSeed,
)

SWEEP = (1 / 8, 1 / 2, 1.0, 2.0, 4.0)
"""Step sizes of a sweep without eta_list, in units of the learning rate."""

IsMode = Literal["snis", "per_decision"]
BatchKind = Literal[
    "update", "evaluation", "prompt_ids", "custom_prompts", "custom_sequence", "from_file"
]


Index = Annotated[int, Field(ge=0), Countable]


def _rollouts(value: Any) -> Any:
    """A union's own error would speak of both its members."""
    items = value if isinstance(value, list | tuple) else [value]
    least = 0 if items is value else 1
    if not items or not all(type(item) is int and item >= least for item in items):
        raise ValueError(
            f"got {shown(value)}, expected how many (1 or more), or a list of rollouts such as "
            "[0, 7]."
        )
    return tuple(value) if isinstance(value, list) else value


class ProbeRework(Section):
    """Phases 1 to 3: the first-order prediction."""

    compute_delta_h1: bool = True
    """false skips phases 1 to 3, the prediction."""
    master_seed: TorchSeed = 0
    """Every random number of a run follows from this."""


class Importance(Section):
    """Phase 5: the measured change."""

    enabled: bool = True
    """false skips phase 5, the measurement."""
    is_mode: IsMode = "per_decision"
    """Weights of each token's past (per_decision, less variance) or of whole responses (snis)."""
    report_per_token: bool | None = None
    """true is approx_delta_h.normalize: per_token, false is per_sequence."""
    clip_c: Positive | None = None
    """Log-weights are clipped to +-clip_c. null: not clipped."""


class Estimator(Section):
    """At which step sizes, and which entropy."""

    eta_list: Some[Positive] | None = None
    """Step sizes of a sweep, as absolute learning rates.
    null: the learning rate times 1/8, 1/2, 1, 2, 4."""
    eta_sweep: bool | None = None
    """Measure at every step size of the sweep. null: if eta_list is given."""
    single_eta: Positive | None = None
    """The one step size without a sweep. null: the learning rate."""
    use_simple_entropy_for_x: bool = False
    """Surprisal of the token drawn instead of the entropy of its distribution; noisier."""

    @model_validator(mode="after")
    def _distinct(self) -> Estimator:
        if self.eta_list is not None and len(set(self.eta_list)) < len(self.eta_list):
            raise ValueError(
                f"estimator.eta_list repeats a step size (got {list(self.eta_list)}). Give each "
                "once; repeats are experiment.repeats."
            )
        return self

    def etas(self, lr: float) -> tuple[float, ...]:
        """The step sizes to measure at, for a step of learning rate `lr`."""
        sweep = self.eta_list is not None if self.eta_sweep is None else self.eta_sweep
        if sweep:
            return self.eta_list or tuple(lr * factor for factor in SWEEP)
        return (self.single_eta or lr,)


class ApproxDeltaH(Section):
    """How the first-order prediction is computed."""

    method: Literal["auto", "jvp", "double_backward", "reverse", "central"] = "auto"
    """Forward derivative (jvp), two backward passes (double_backward), one gradient for all
    directions without error bars (reverse), or that with the spread of differences (central).
    auto: the first of these that the model has; the result says which."""
    normalize: Literal["per_token", "per_sequence"] = "per_token"
    """Unit of every entropy: nats per token, or per response."""
    microbatch_size: Count | None = None
    """Same as memory_config.microbatch_size."""
    baseline: bool = False
    """Subtract a cross-fitted baseline in the state term: less variance. Needs importance.is_mode:
    per_decision, and a method other than reverse."""
    variance: bool = True
    """Noise floor of the prediction, from five repacked passes. Intervals are there without it."""
    curvature: bool = True
    """Second-order term and the range over which the line is straight."""

    @model_validator(mode="after")
    def _forward(self) -> ApproxDeltaH:
        if self.baseline and self.method == "reverse":
            raise ValueError(
                "approx_delta_h.baseline is true with approx_delta_h.method 'reverse', which has "
                "no per-rollout terms to subtract it from. Use method: auto, or baseline: false."
            )
        return self


class TrueDeltaH(Section):
    """How the change is measured; names of document 004 for settings of other sections."""

    enabled: bool | None = None
    """Same as importance.enabled."""
    is_mode: IsMode | None = None
    """Same as importance.is_mode."""
    report_per_token: bool | None = None
    """Same as importance.report_per_token."""
    clip_c: Positive | None = None
    """Same as importance.clip_c."""
    microbatch_size: Count | None = None
    """Same as memory_config.microbatch_size."""
    tf_batch_size: Count | None = None
    """Same as generation.tf_batch_size; raise it when memory allows."""


class MemoryConfig(Section):
    """Memory against speed. Nothing here changes a number beyond the last digits."""

    microbatch_size: Count = 2
    """Sequences per pass with gradient. The first thing to lower when memory runs out."""
    gradient_checkpointing: bool = False
    """Recompute activations instead of keeping them."""


class Precision(Section):
    """Precision of the arithmetic."""

    runtime_dtype: Dtype | None = None
    """Same as checkpoint.dtype."""
    allow_tf32: bool = False
    """false alone: TF32 rounds matrix products to 10 bits, and small changes drown in that."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """torch.set_float32_matmul_precision. highest alone: the others are TF32 or less."""

    @model_validator(mode="after")
    def _full(self) -> Precision:
        wrong = []
        if self.allow_tf32:
            wrong.append("precision.allow_tf32 is true, expected false")
        if self.matmul_precision != "highest":
            got = self.matmul_precision
            wrong.append(f"precision.matmul_precision is {got!r}, expected 'highest'")
        if wrong:
            raise ValueError(
                f"{'; '.join(wrong)}. TF32 keeps 10 bits of a product, fewer than the change of "
                "entropy needs: the probe asserts that float32 means float32. Leave the key out; "
                "less memory is checkpoint.dtype: bfloat16."
            )
        return self


class Workspace(Section):
    """The update batch of an influence study.

    Examples:
        >>> WorkspaceSpec(kind="update").load_path is None
        True
    """

    kind: BatchKind = "update"
    """Where the update batch comes from."""
    params: dict[str, Any] = Field(default_factory=dict)
    """What that kind needs: prompt ids, texts, a file, ..."""
    load_path: Path | None = None
    """Workspace saved by an earlier study."""
    save_path: Path | None = None
    """Where to save this one. A folder with another batch is refused."""


class BatchRequest(Section):
    """One evaluation batch of an influence study.

    Examples:
        >>> BatchRequest().kind
        'evaluation'
    """

    kind: BatchKind = "evaluation"
    """Where the evaluation batch comes from."""
    params: dict[str, Any] = Field(default_factory=dict)
    """What that kind needs: prompt ids, texts, a file, ..."""


class Influence(Section):
    """Which rollouts and tokens moved the entropy. Read by the influence study."""

    workspace: Workspace = Workspace()
    """The update batch."""
    evaluation_requests: Many[BatchRequest] = (BatchRequest(),)
    """The evaluation batches: a list of {kind, params}."""
    etas: Some[Positive] | None = None
    """Step sizes; the first is the reference. null: the learning rate."""
    per_sequence_etas: Some[Positive] | None = None
    """Step sizes of the measurement rollout by rollout. null: as etas."""
    grad_chunk_size: Count | None = None
    """Directions and step sizes per pass over the evaluation batch. null: 1."""
    microbatch_size: Count | None = None
    """Same as memory_config.microbatch_size."""
    measured_rollouts: Annotated[int | tuple[int, ...], BeforeValidator(_rollouts)] = 16
    """Update rollouts whose own direction is also measured: so many, the largest by first-order
    influence, or a list of rollouts."""
    finite: bool = False
    """Fill the matrix with measured changes instead of first-order ones; columns of rollouts that
    are not measured are NaN."""
    leave_one_out: Many[Index] = ()
    """Update rollouts to leave out exactly: advantages, normaliser, clip and denominator anew."""
    fisher: bool = False
    """The Fisher kernel too: how much learning from each update rollout raises the log-prob of each
    evaluation rollout, and the changes it predicts against those measured."""
    fisher_centred: bool = False
    """Subtract the mean gradient of either side from the kernel and its cosines: the noise that all
    pairs share."""
    folds: Annotated[int, Field(ge=2), Countable] = 2
    """Parts of the evaluation prompts that give each token its standard error and its sign. At most
    one for each prompt; with one prompt nothing is ranked."""
    block_mb: Count = 256
    """Memory for the gradients of a block of update rollouts while the matrix is made, in MB."""
    reward: bool = True
    """The ledger of the expected reward too, where evaluation rollouts have rewards."""
    ranked_tokens: Count = 10
    """How many tokens summary.json lists as the most destroying and the most creating."""
    what_if: Names = ()
    """Counterfactual steps to predict: drop=negative, clip_high=0.28, lr=1e-3, ..."""
    confirm: bool = False
    """Rebuild each counterfactual step in full and measure it."""
    entropy_budget: Number | None = None
    """Change of entropy in nats (below 0: entropy spent) whose learning rate is asked."""
    plots: bool = True
    """Draw the ledger and the measured rollouts into plots/, where matplotlib is installed."""
    run_directory: Path | None = None
    """Folder of all result files. null: results/entropy_influence/<checkpoint>_<key>."""

    @model_validator(mode="after")
    def _kernel(self) -> Influence:
        if self.fisher_centred and not self.fisher:
            raise ValueError(
                "influence.fisher_centred is true and influence.fisher is false: there is no "
                "kernel to centre. Set influence.fisher: true (--fisher), or leave it out."
            )
        return self


class Experiment(Section):
    """Sweeps and repeats. Read by EntropyMeasurements."""

    compute_true: bool = True
    """Measure."""
    compute_linear: bool = True
    """Predict to first order."""
    compute_linquad: bool = False
    """Predict to second order."""
    eta_list: Some[Positive] | None = None
    """Same as estimator.eta_list."""
    repeats: Count = 1
    """Fresh E and U batches this many times."""
    clip_overrides: Many[Positive | None] = ()
    """Measure under each of these clip_c as well."""
