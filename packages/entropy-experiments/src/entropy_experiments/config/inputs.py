"""Sections that say what is probed: checkpoint, prompts, sampling, and how training made its step.

None in `update` means *not given*: the probe then reads the value from the files of training, and
where they are silent assumes one and lists it in the verdict.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from entropy_experiments.config.fields import (
    Count,
    Countable,
    Dtype,
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

    loss: (
        Literal["reinforce", "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "rloo"]
        | None
    ) = None
    """Training loss (TRL's loss_type; rloo: RLOOTrainer's)."""
    advantage: Literal["group", "batch", "none"] | None = None
    """What rewards are scaled by (TRL's scale_rewards)."""
    ratio: Literal["token", "sequence"] | None = None
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
