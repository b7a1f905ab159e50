"""Sections that say what is computed, and with which memory and precision."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from entropy_experiments.config.fields import (
    Count,
    Countable,
    Many,
    Names,
    Number,
    Path,
    Positive,
    Section,
    Some,
)
from entropy_experiments.config.nested import shown

SWEEP = (1 / 8, 1 / 2, 1.0, 2.0, 4.0)
"""Step sizes of a sweep without learning_rates, in units of the learning rate."""

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


class Entropy(Section):
    """Which entropy: of every number, predicted or measured."""

    unit: Literal["per_token", "per_sequence"] = "per_token"
    """Unit of every entropy: nats per token, or per response."""
    surprisal: bool = False
    """Surprisal of the token drawn instead of the entropy of its distribution; noisier."""


class Predict(Section):
    """The first-order prediction of the entropy change."""

    enabled: bool = True
    """false skips the prediction."""
    method: Literal["auto", "jvp", "double_backward", "reverse", "central"] = "auto"
    """Forward derivative (jvp), two backward passes (double_backward), one gradient for all
    directions without error bars (reverse), or that with the spread of differences (central).
    auto: the first of these that the model has; the result says which."""
    baseline: bool = False
    """Subtract a cross-fitted baseline in the state term: less variance. Needs measure.weighting:
    per_decision, and a method other than reverse."""
    noise_floor: bool = True
    """Noise floor of the prediction, from five repacked passes. Intervals are there without it."""
    curvature: bool = True
    """Second-order term and the range over which the line is straight."""

    @model_validator(mode="after")
    def _forward(self) -> Predict:
        if self.baseline and self.method == "reverse":
            raise ValueError(
                "predict.baseline is true with predict.method 'reverse', which has no per-rollout "
                "terms to subtract it from. Use method: auto, or baseline: false."
            )
        return self


class Measure(Section):
    """The measured entropy change; and what `entropy-probe measure` repeats over fresh batches."""

    enabled: bool = True
    """false skips the measurement of `entropy-probe run`."""
    weighting: Literal["snis", "per_decision"] = "per_decision"
    """Weights of each token's past (per_decision, less variance) or of whole responses (snis)."""
    clip_log_weights: Positive | None = None
    """Log-weights are clipped to plus or minus this. null: not clipped."""
    learning_rates: Some[Positive] | None = None
    """Step sizes of a sweep, as absolute learning rates.
    null: the learning rate times 1/8, 1/2, 1, 2, 4."""
    sweep: bool | None = None
    """Measure at every step size of the sweep. null: if learning_rates are set."""
    learning_rate: Positive | None = None
    """The one step size without a sweep. null: the learning rate of the step."""
    measured: bool = True
    """`entropy-probe measure`: measure."""
    first_order: bool = True
    """`entropy-probe measure`: predict to first order."""
    second_order: bool = False
    """`entropy-probe measure`: predict to second order."""
    repeats: Count = 1
    """`entropy-probe measure`: fresh evaluation and update batches this many times."""
    more_clips: Many[Positive | None] = ()
    """`entropy-probe measure`: measure under each of these clip_log_weights as well."""

    @model_validator(mode="after")
    def _distinct(self) -> Measure:
        rates = self.learning_rates
        if rates is not None and len(set(rates)) < len(rates):
            raise ValueError(
                f"measure.learning_rates repeats a step size (got {list(rates)}). Give each once; "
                "repeats are measure.repeats."
            )
        return self

    def etas(self, lr: float) -> tuple[float, ...]:
        """The step sizes to measure at, for a step of learning rate `lr`."""
        sweep = self.learning_rates is not None if self.sweep is None else self.sweep
        if sweep:
            return self.learning_rates or tuple(lr * factor for factor in SWEEP)
        return (self.learning_rate or lr,)


class Memory(Section):
    """Memory against speed. Nothing here changes a number beyond the last digits."""

    microbatch_size: Count = 2
    """Sequences per pass with gradient. The first thing to lower when memory runs out."""
    forward_batch_size: Count | None = None
    """Sequences per pass without gradient; raise it when memory allows. null: eight times
    microbatch_size."""
    gradient_checkpointing: bool = False
    """Recompute activations instead of keeping them."""


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

    update_batch: Workspace = Workspace()
    """The update batch."""
    evaluation_batches: Many[BatchRequest] = (BatchRequest(),)
    """The evaluation batches: a list of {kind, params}."""
    learning_rates: Some[Positive] | None = None
    """Step sizes; the first is the reference. null: the learning rate."""
    rollout_learning_rates: Some[Positive] | None = None
    """Step sizes of the measurement rollout by rollout. null: as learning_rates."""
    directions_per_pass: Count | None = None
    """Directions and step sizes per pass over the evaluation batch. null: 1."""
    measured_rollouts: Annotated[int | tuple[int, ...], BeforeValidator(_rollouts)] = 16
    """Update rollouts whose own direction is also measured: so many, the largest by first-order
    influence, or a list of rollouts."""
    measured_matrix: bool = False
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
    gradient_block_mb: Count = 256
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
    folder: Path | None = None
    """Folder of all result files. null: results/entropy_influence/<checkpoint>_<key>."""

    @model_validator(mode="after")
    def _kernel(self) -> Influence:
        if self.fisher_centred and not self.fisher:
            raise ValueError(
                "influence.fisher_centred is true and influence.fisher is false: there is no "
                "kernel to centre. Set influence.fisher: true (--fisher), or leave it out."
            )
        return self
