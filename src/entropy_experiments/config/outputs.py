"""Sections that say what is written where, and the training run that makes checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from entropy_experiments.config.fields import (
    Count,
    Names,
    NotNegative,
    Number,
    Path,
    Positive,
    Section,
)


class DetailedLogging(Section):
    """The log files of a run."""

    enabled: bool = True
    """Write log files."""
    level: Literal["minimal", "standard", "detailed", "debug"] = "standard"
    """minimal 1 KB, standard 5-10 KB, detailed 50-500 KB (each rollout), debug 1-10 MB (tokens)."""
    log_sequences: bool = True
    """false leaves prompts and responses out of what the level allows."""
    log_tokens: bool = True
    """false leaves token by token values out of what the level allows."""
    log_raw_tensors: bool = True
    """false leaves raw tensors out of what the level allows."""
    output_directory: Path = "logs"
    """Folder of the log files, one folder per day inside."""
    compress: bool = True
    """gzip the full log."""
    max_files: Count | None = None
    """Keep only the newest runs. null: all."""


class Output(Section):
    """What else a run writes."""

    results_path: Path | None = None
    """File for the results as JSON."""


class Lora(Section):
    """The adapter that is trained."""

    r: Count = 16
    """Rank."""
    alpha: Positive = 32.0
    """Scale: the adapter is multiplied by alpha / r."""
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Dropout before the adapter. Any makes steps impossible to rebuild exactly."""
    target_modules: Annotated[Names, Field(min_length=1)] = ("all-linear",)
    """Layers that get an adapter, by name; all-linear: every linear layer but the head."""


class OnlineProbe(Section):
    """The probe inside training."""

    enabled: bool = True
    """Probe while training."""
    every: Count = 10
    """Steps between probes."""
    max_overhead: NotNegative = 0.1
    """Share of training time that the probe may take; it skips turns to stay below."""


class Training(Section):
    """A training run. Loss, prompts and sampling are those of update, batch_config, generation."""

    output_dir: Path = "runs"
    """Folder of checkpoints."""
    max_steps: Count = 100
    """Optimizer steps."""
    learning_rate: Positive = 1e-5
    """Peak learning rate."""
    per_device_batch_size: Count = 8
    """Responses per device and pass."""
    gradient_accumulation_steps: Count = 1
    """Passes per optimizer step."""
    save_steps: Count = 10
    """Steps between checkpoints."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of training."""
    lora: Lora | None = Lora()
    """The adapter. null: all weights are trained."""
    probe: OnlineProbe = OnlineProbe()
    """When the probe looks, and how much time it may take."""
