"""Document 002's `model_loader`, 004's `utils.model_loader`; the home is `checkpoints.load`."""

from entropy_experiments.utils.model_loader import (
    Checkpoint,
    load_adam_optimizer_from_path,
    load_checkpoint,
    load_peft_for_probe,
)

__all__ = [
    "Checkpoint",
    "load_adam_optimizer_from_path",
    "load_checkpoint",
    "load_peft_for_probe",
]
