"""The section that says what is written where."""

from __future__ import annotations

from typing import Literal

from entropy_experiments.config.fields import Count, Path, Section


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
