"""The sections of a run's configuration: what is probed, what is computed, what is written.

None in `update` means *not given*: the probe then reads the value from the files of training, and
where they are silent assumes one and lists it in the verdict.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from entropy_experiments.config.fields import (
    Count,
    Countable,
    Dtype,
    Many,
    Names,
    NotNegative,
    Number,
    Path,
    Positive,
    Section,
    Some,
    Text,
    TorchSeed,
)
from entropy_experiments.config.keys import shown
from entropy_experiments.loss_names import Loss, Ratio

FUNCTION = re.compile(r"([A-Za-z_][\w.]*|.+\.py)(:[A-Za-z_]\w*)?")


class Checkpoint(Section):
    """Which policy is probed."""

    path: Path | None = None
    """Folder step_N, step_N/model or checkpoint-N; embedded/checkpoint-N: of the run shipped here.
    null: its checkpoint-13."""
    adapter: Path | None = None
    """LoRA adapter, if it lies elsewhere than in `path`."""
    optimizer: Path | None = None
    """optimizer.pt, if it lies elsewhere than in `path` or one level above."""
    base: Text | None = None
    """Base model of an adapter: folder, hub name or .gguf file. null: what the adapter names."""
    backbone: Text | None = None
    """Short name of a base model: qwen2_5_15, smollm2, ... `base` says the same in full."""
    dtype: Dtype = "auto"
    """Precision of the weights in memory. auto: as stored."""
    device: Text = "auto"
    """auto, cpu, cuda or cuda:N."""
    sharding: Literal["none", "fsdp"] = "none"
    """fsdp: the model is cut over the processes of torchrun, for models larger than one device.
    With `run`, `measure` and `evaluate`, and predict.method auto, central or reverse."""


class Data(Section):
    """Which prompts and rollouts: the evaluation batch (E) says what the step does to entropy, the
    update batch (U) makes the step."""

    dataset: Text | None = None
    """gsm8k_r1_template, gsm8k, countdown, countdown_r1_template, jsonl or reasoning_gym:<name>.
    null: the prompts that training recorded, or named beside the checkpoint; without either,
    gsm8k_r1_template."""
    file: Path | None = None
    """Local JSONL file to read the problems from."""
    split: Text | None = None
    """Split of both batches, unless evaluation_split or update_split says otherwise."""
    evaluation_split: Text | None = None
    """Split of the evaluation prompts."""
    update_split: Text | None = None
    """Split of the update prompts."""
    chat_template: bool | None = None
    """Wrap each prompt in the tokenizer's chat template. null: where training recorded messages as
    its prompts. Prompts that are messages themselves always are."""
    evaluation_prompts: Annotated[int, Field(ge=2), Countable] = 64
    """Evaluation prompts (B_E), one response each; intervals are over these prompts. A recorded run
    with fewer prompts has all that are left, without those that the update batch needs."""
    update_prompts: Count = 16
    """Update prompts (B_U), responses_per_prompt responses each; never the evaluation prompts. A
    recorded run with fewer prompts has as many as training's batch had."""
    responses_per_prompt: Annotated[int, Field(ge=2), Countable] = 8
    """Responses per update prompt (G): the group that advantages compare."""
    evaluation_rollouts: Literal["drawn", "recorded"] = "drawn"
    """recorded: the very rollouts that the callback probed this step with, instead of new ones."""
    update_rollouts: Literal["auto", "recorded", "drawn"] = "auto"
    """The update batch that training recorded, or a drawn one. auto: recorded if there is one."""
    resample_equal_rewards: bool = True
    """Draw another prompt for a group whose rewards are all equal: its advantages are zero."""
    zero_advantage_tolerance: NotNegative = 1e-8
    """Advantages below this count as zero there."""
    max_resamples: Annotated[int, Field(ge=0), Countable] = 5
    """How many times another prompt is drawn before a warning, with which the run goes on."""
    reward_functions: Annotated[Names, Field(min_length=1)] | None = None
    """math_verify, answer_exact, format, countdown or your own: module:function, file.py:function.
    null: what training recorded, else those of the dataset."""
    reward_weights: Some[Number] | None = None
    """One weight per function. null: all 1."""
    reward_seconds: Positive = 600.0
    """Longest that a function of your own may take for one batch of responses."""

    @model_validator(mode="after")
    def _paired(self) -> Data:
        functions, weights = self.reward_functions or (), self.reward_weights
        for name in functions:
            if not FUNCTION.fullmatch(name):
                raise ValueError(
                    f"data.reward_functions has {name!r}; expected a name, module:function or "
                    "file.py:function. Nothing of it was imported."
                )
        if weights is not None and len(weights) != len(functions):
            raise ValueError(
                f"data.reward_weights has {len(weights)} numbers for {len(functions)} "
                "data.reward_functions. Give one weight per function."
            )
        return self


class Sampling(Section):
    """How responses are drawn and kept: an interrupted run continues, another run reuses them."""

    temperature: Positive | None = None
    """Sampling temperature; part of the policy. null: training's, else 1.0."""
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    """Nucleus mass of the distribution that is probed. null: 1, the full softmax, whatever training
    had."""
    max_new_tokens: Count | None = None
    """Longest response. null: training's max_completion_length."""
    batch_size: Count = 64
    """Responses sampled at a time, and no more than a quarter of a batch of 32 or more.
    Memory and speed only, never a number."""
    stop: Names = ()
    """Texts that end a response."""
    seed: TorchSeed = 0
    """Every random number of a run follows from this."""
    save: Path | None = None
    """Folder where finished rollouts and both batches are kept. null: a run can still continue from
    finished rollouts, which then lie in `rollouts` below output.folder."""
    load: Path | None = None
    """Folder of an earlier run whose rollouts are used instead of drawing new ones."""


class Update(Section):
    """How training made its step. null: read from entropy_probe.json or a TRL YAML, or assumed."""

    loss: Loss | None = None
    """Training loss (TRL's loss_type; rloo: RLOOTrainer's)."""
    advantage: Literal["group", "batch", "none"] | None = None
    """What rewards are scaled by (TRL's scale_rewards)."""
    ratio: Ratio | None = None
    """Importance ratio per token, or per sequence as in GSPO."""
    clip_low: Annotated[Number, Field(ge=0, le=1)] | None = None
    """Ratios are clipped at 1 - clip_low (TRL's epsilon). 1 never clips."""
    clip_high: NotNegative | None = None
    """Ratios are clipped at 1 + clip_high (TRL's epsilon_high). A large number never clips.
    cispo: the ratio itself is bounded by it."""
    delta: Positive | None = None
    """Two-sided clipping: no ratio counts for more than this (TRL's delta). null: off."""
    sapo_positive: Positive | None = None
    """sapo's temperature where the advantage is positive (TRL's sapo_temperature_pos)."""
    sapo_negative: Positive | None = None
    """sapo's temperature where it is not (TRL's sapo_temperature_neg)."""
    beta: NotNegative | None = None
    """Weight of the KL term against the reference policy."""
    kl_ratio: bool | None = None
    """The KL term is multiplied by the ratio (TRL's use_bias_correction_kl, on by default)."""
    entropy_coef: Number | None = None
    """Weight of the entropy bonus."""
    max_grad_norm: NotNegative | None = None
    """Gradient norm is clipped to this. 0 never clips."""
    max_completion_length: Count | None = None
    """Longest response in training; dr_grpo divides by it."""
    num_iterations: Count | None = None
    """Optimizer passes over one batch of rollouts."""
    lr: Positive | None = None
    """Learning rate of the step. null: the one stored in the optimizer's groups."""
    amp_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Autocast precision of training. float32: none. The step is rebuilt in the parameters'
    precision; the verdict notes a difference."""


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


class Output(Section):
    """What a run writes: its log files, and the results as one file."""

    log: bool = True
    """Write log files."""
    level: Literal["minimal", "standard", "detailed", "debug"] = "standard"
    """minimal 1 KB, standard 5-10 KB, detailed 50-500 KB (each rollout), debug 1-10 MB (tokens)."""
    log_sequences: bool = True
    """false leaves prompts and responses out of what the level allows."""
    log_tokens: bool = True
    """false leaves token by token values out of what the level allows."""
    log_raw_tensors: bool = True
    """false leaves raw tensors out of what the level allows."""
    folder: Path = "logs"
    """Folder of the log files, one folder per day inside."""
    compress: bool = True
    """gzip the full log."""
    max_logs: Count | None = None
    """Keep only the newest runs. null: all."""
    results_file: Path | None = None
    """File for the results as JSON."""
