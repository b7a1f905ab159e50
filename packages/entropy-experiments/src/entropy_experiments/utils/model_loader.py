"""Document 004's `utils.model_loader`; the home is `checkpoints.load`.

`load_checkpoint` reads backbone, adapter, tokenizer and Adam state together and refuses what does
not fit; the two other functions have the shapes of the earlier ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from entropy_experiments.checkpoints.load import Checkpoint, load_checkpoint
from entropy_experiments.checkpoints.optimizer_state import read_optimizer_state
from entropy_experiments.types import OptimizerState

__all__ = [
    "Checkpoint",
    "load_adam_optimizer_from_path",
    "load_checkpoint",
    "load_peft_for_probe",
]


def load_peft_for_probe(
    base_id: str | Path | None,
    adapter_path: str | Path,
    *,
    dtype: str = "float32",
    device_map: Any = "auto",
) -> tuple[nn.Module, Any]:
    """(model in eval mode, its adapter requiring gradients, and the tokenizer)."""
    checkpoint = load_checkpoint(
        adapter_path, base=base_id, dtype=dtype, device_map=device_map, read_optimizer=False
    )
    return checkpoint.model, checkpoint.tokenizer


def load_adam_optimizer_from_path(model: nn.Module, optimizer_path: str | Path) -> OptimizerState:
    """Adam's memory by parameter name; a state of another model is refused."""
    return read_optimizer_state(Path(optimizer_path), model)[0]
