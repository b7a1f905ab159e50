"""`TrainingConfig`: one GRPO training, in TRL's own names beside those of document 001.

| key | counts |
|---|---|
| buffer_size | prompts per optimizer step, over all ranks |
| rollout_batch_size | prompts generated at once, per rank |
| microbatch_size | prompts per backward pass, per rank |
| tf_micro_batch | sequences scored per forward pass |
| num_generations | responses per prompt |

A document of its own, not a section of the probe's configuration: a file is for `entropy-probe
train` or for the other commands. Keys are flat, as in the file one gives to TRL.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from entropy_experiments.config.fields import (
    Count,
    Countable,
    Names,
    NotNegative,
    Number,
    Path,
    Positive,
    Section,
    Seed,
    Some,
    Text,
)
from entropy_experiments.config.sections import FUNCTION

MOST_PROBLEMS = 100_000
"""As many as are made or read at once (tasks.datasets)."""
MOST_TRL_KEYS = 1000
OURS = (
    "output_dir",
    "disable_tqdm",
    "shuffle_dataset",
    "generation_batch_size",
    "num_train_epochs",
    "model_init_kwargs",
    "trust_remote_code",
    "save_strategy",
    "save_only_model",
    "logging_strategy",
    "ignore_data_skip",
    "resume_from_checkpoint",
    "remove_unused_columns",
    "fp16",
    "auto_find_batch_size",
)
"""Fields of GRPOConfig that `trl:` may not set: the run decides them, or could not be resumed."""


def _scale(value: Any) -> Any:
    """TRL reads true and "group", false and "none" as the same."""
    return {True: "group", False: "none"}[value] if isinstance(value, bool) else value


class Lora(Section):
    """The adapter that is trained."""

    r: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Rank."""
    alpha: Positive = 32.0
    """Scale: the adapter is multiplied by alpha / r."""
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Dropout before the adapter. Any makes steps impossible to rebuild exactly."""
    target_modules: Annotated[Names, Field(min_length=1)] = ("all-linear",)
    """Layers that get an adapter, by name; all-linear: every linear layer but the head."""


class Probe(Section):
    """The probe inside training."""

    enabled: bool = True
    """Predict and measure the entropy change of steps. Training is the same without it."""
    every: Count = 1
    """Steps between probed steps."""
    max_overhead: Positive | None = 0.1
    """Share of training time that the probe may take; it skips turns to stay below, but it probes
    at least every 10 steps. null: no limit."""
    evaluation: Literal["fresh", "half", "batch"] = "fresh"
    """Rollouts it measures on: drawn for it, those that the step does not learn from, or (batch)
    the very ones it learns from, each prompt measured by the others' gradients."""
    prompts: Annotated[int, Field(ge=5, le=MOST_PROBLEMS)] = 16
    """Evaluation prompts of a probed step."""
    group: Count = 1
    """Responses to each."""
    uses: Count = 1
    """Probed steps that share fresh rollouts."""
    microbatch: Count | None = None
    """Sequences per pass of the probe. null: tf_micro_batch, else 8."""
    parts: bool = True
    """Also split the prediction: what the batch does, and what momentum and decay do."""
    order: Literal[1, 2] = 1
    """Of the prediction. 2: also with the curvature, for one more pass before the step."""
    record: bool = True
    """Keep every step's batch, so that the offline commands can replay it."""
    ledger_every: Count | None = None
    """Steps between attributions of the entropy change by rollout and by token, written to
    entropy_probe_ledgers/step_N. null: none."""
    noise_scale: bool = False
    """Also the gradient noise scale and the critical batch size, from the backward passes of each
    step."""
    seed: Seed = 0
    """Of the evaluation prompts and rollouts; training has its own."""


class Doctor(Section):
    """The gradient doctor in the first steps."""

    enabled: bool = True
    """Look for parameters that get no gradient, and why."""
    mode: Literal["light", "auto"] = "light"
    """light: gradients and updates, at no cost to be noticed. auto: the first steps are traced call
    by call, to name the line where a gradient stops; but for toys that takes minutes a step."""
    trace_steps: Count = 3
    """Steps looked at from the start."""
    every: Count = 50
    """Afterwards, one step in so many is looked at."""
    raise_on: Literal["error", "warning"] | None = None
    """End training at such a finding. null: say it, and go on."""


class TrainingConfig(Section):
    """A whole training run. Every key is optional."""

    model: Text = "embedded"
    """embedded: the small policy of the package; smollm2, qwen2_5_15, ...; a folder, a hub name or
    a .gguf file."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Precision of the weights. auto: as stored. bfloat16: on a GPU only."""
    bf16: bool | None = None
    """Autocast to bfloat16. null: on a GPU that can, and never on a CPU."""
    use_cpu: bool = False
    """Train on the CPU even if there is a GPU."""
    lora: Lora | None = Lora()
    """The adapter. null: all weights are trained."""
    gradient_checkpointing: bool = False
    """Recompute activations instead of keeping them."""

    dataset_name: Text = "countdown"
    """gsm8k_r1_template, gsm8k, countdown, countdown_r1_template, jsonl or reasoning_gym:<name>."""
    dataset_path: Path | None = None
    """Local JSONL file to read the problems from."""
    split: Text | None = None
    """Split of the dataset. null: train."""
    dataset_size: Annotated[int, Field(ge=1, le=MOST_PROBLEMS)] | None = None
    """Problems to train on. null: all of a file; of those made here as many as the steps need, at
    most 4096."""
    eval_prompts: Annotated[int, Field(ge=0, le=MOST_PROBLEMS)] = 64
    """Problems kept out of training, for the probe to ask. 0: it asks those of training."""
    chat_template: bool = False
    """Wrap each prompt in the tokenizer's chat template."""
    reward_functions: Annotated[Names, Field(min_length=1)] | None = None
    """math_verify, answer_exact, format, countdown or your own module:function. null: those of the
    dataset."""
    reward_weights: Some[Number] | None = None
    """One weight per function. null: all 1."""

    num_generations: Annotated[int, Field(ge=2), Countable] = 8
    """Responses per prompt: the group that advantages compare."""
    buffer_size: Count | None = None
    """Prompts per optimizer step, over all ranks. null: 16, unless gradient_accumulation_steps
    says otherwise."""
    microbatch_size: Count | None = None
    """Prompts per backward pass and rank. null: what per_device_train_batch_size says, else 4, or
    fewer if a rank has fewer."""
    rollout_batch_size: Count | None = None
    """Prompts generated at once, per rank. Memory and speed, and which random numbers a response
    gets. null: all of them."""
    tf_micro_batch: Count | None = None
    """Sequences scored per forward pass without gradient, by TRL and by the probe. null: as in a
    backward pass."""
    per_device_train_batch_size: Count | None = None
    """TRL's name, in sequences: microbatch_size x num_generations."""
    gradient_accumulation_steps: Count | None = None
    """TRL's name: buffer_size / (ranks x microbatch_size)."""
    steps_per_generation: Count | None = None
    """Backward passes served by one generation. null: gradient_accumulation_steps, so that every
    step learns from new responses."""
    num_iterations: Count = 1
    """Optimizer passes over one batch of rollouts."""

    temperature: Positive = 1.0
    """Sampling temperature; part of the policy."""
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    """Nucleus mass of the rollouts. The probe is about the full softmax, whatever this is."""
    max_completion_length: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Longest response; dr_grpo divides by it."""

    loss_type: Literal["dr_grpo", "dapo", "grpo", "bnpo"] = "dr_grpo"
    """Training loss."""
    scale_rewards: Annotated[Literal["group", "batch", "none"], BeforeValidator(_scale)] = "none"
    """What rewards are divided by."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Importance ratio per token, or per sequence as in GSPO."""
    beta: NotNegative = 0.0
    """Weight of the KL term against the reference policy."""
    epsilon: Annotated[Number, Field(ge=0, le=1)] = 0.2
    """Ratios are clipped at 1 - epsilon."""
    epsilon_high: NotNegative | None = None
    """Ratios are clipped at 1 + epsilon_high. null: epsilon."""
    max_grad_norm: NotNegative = 1.0
    """Gradient norm is clipped to this. 0 never clips."""

    max_steps: Count = 100
    """Optimizer steps."""
    learning_rate: Positive = 1e-5
    """Peak learning rate."""
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = "constant"
    """How the learning rate goes on from there."""
    warmup_steps: Annotated[int, Field(ge=0), Countable] = 0
    """Steps of the rise to it."""
    weight_decay: NotNegative = 0.0
    """AdamW's decay."""
    adam_beta1: Annotated[Number, Field(ge=0, lt=1)] = 0.9
    """Memory of AdamW's first moment."""
    adam_beta2: Annotated[Number, Field(ge=0, lt=1)] = 0.999
    """Memory of its second moment."""
    adam_epsilon: Positive = 1e-8
    """Added to its root."""
    seed: Seed = 0
    """Of problems, adapters and rollouts."""

    output_dir: Path = "runs/train"
    """Folder of the run."""
    save_steps: Count = 10
    """Steps between checkpoints."""
    save_first: bool = True
    """A checkpoint before the first step, too."""
    save_total_limit: Count | None = None
    """Keep only the newest checkpoints. null: all."""
    logging_steps: Count = 1
    """Steps between rows of metrics."""
    report_to: Names = ()
    """Trackers: tensorboard, wandb, ... Each must be installed."""
    run_name: Text | None = None
    """Name of the run there."""

    probe: Probe = Probe()
    """The probe inside training: when it looks, and by what."""
    doctor: Doctor = Doctor()
    """The gradient doctor in the first steps."""
    trl: dict[str, Any] = Field(default_factory=dict)
    """Any other field of TRL's GRPOConfig, by its own name: use_vllm, optim, ..."""

    _notes: tuple[str, ...] = PrivateAttr(default=())
    _source: str = PrivateAttr(default="config")

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each accepted key that means nothing or is read as another."""
        return self._notes

    @property
    def source(self) -> str:
        """Where it was read from, in words."""
        return self._source

    def dump(self) -> dict[str, Any]:
        """Plain dict of every key; `parse_training` of it gives the same configuration."""
        return self.model_dump(mode="json")

    @model_validator(mode="after")
    def _rewards_paired(self) -> TrainingConfig:
        functions = self.reward_functions or ()
        for name in functions:
            if not FUNCTION.fullmatch(name):
                raise ValueError(
                    f"reward_functions has {name!r}; expected a name or module:function. Nothing "
                    "of it was imported."
                )
        if self.reward_weights is not None and len(self.reward_weights) != len(functions):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} numbers for {len(functions)} "
                "reward_functions. Give one weight per function."
            )
        return self

    @model_validator(mode="after")
    def _named_once(self) -> TrainingConfig:
        if len(self.trl) > MOST_TRL_KEYS:
            raise ValueError(
                f"trl has {len(self.trl)} keys; expected fields of TRL's GRPOConfig, which has a "
                "few hundred."
            )
        given = set(type(self).model_fields) & set(self.trl)
        if given:
            name = sorted(given)[0]
            raise ValueError(
                f"trl has {name}, which is a key of its own. Write {name}: at the top."
            )
        ours = [name for name in self.trl if name in OURS]
        if ours:
            raise ValueError(
                f"trl has {ours[0]}, which this command decides itself. Take it out of trl."
            )
        return self

    @model_validator(mode="after")
    def _whole_parameters(self) -> TrainingConfig:
        named = [name for name in ("deepspeed", "fsdp") if self.trl.get(name)]
        if named and self.probe.enabled:
            raise ValueError(
                f"trl has {named[0]}, under which parameters or gradients are not where the probe "
                "looks for them. Leave it out, or train with --no-probe (probe.enabled: false) and "
                "probe saved checkpoints offline."
            )
        return self

    @model_validator(mode="after")
    def _ledgers_have_other_judges(self) -> TrainingConfig:
        if self.probe.ledger_every is not None and self.probe.evaluation == "batch":
            raise ValueError(
                f"probe.ledger_every is {self.probe.ledger_every} with probe.evaluation batch: "
                "every rollout of the ledger would be judged by itself. Set probe.evaluation to "
                "fresh or half, or leave probe.ledger_every out."
            )
        return self

    @model_validator(mode="after")
    def _checkpoints_between_generations(self) -> TrainingConfig:
        if self.num_iterations > 1 and self.save_steps % self.num_iterations:
            raise ValueError(
                f"save_steps is {self.save_steps} with num_iterations {self.num_iterations}: a "
                "checkpoint in the middle of a batch of rollouts cannot be resumed exactly. Make "
                "save_steps a multiple of num_iterations."
            )
        return self
