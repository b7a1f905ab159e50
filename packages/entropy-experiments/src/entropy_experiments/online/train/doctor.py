"""The gradient doctor over a training, where `gradient-doctor` is installed.

It is a package of its own, and training works without it: then nothing is examined, and the run
says so.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from entropy_experiments.config.training import TrainingConfig

if TYPE_CHECKING:
    from gradient_doctor.hf import DoctorCallback

INSTALL = "pip install gradient-doctor"
NOT_INSTALLED = f"gradient doctor: not installed, so gradients are not examined ({INSTALL})"


def installed() -> bool:
    """Whether there is a doctor to ask."""
    return find_spec("gradient_doctor") is not None


def examining(config: TrainingConfig, json: Path) -> DoctorCallback | None:
    """The doctor that the configuration asks for; None: none, or it is not installed."""
    wanted = config.doctor
    if not wanted.enabled:
        return None
    if not installed():
        if wanted.raise_on is not None:
            raise ValueError(
                f"doctor.raise_on is {wanted.raise_on!r}, and gradient-doctor is not installed; "
                f"expected the package, since nothing would be raised. {INSTALL}, or set "
                "doctor.raise_on: null."
            )
        return None
    from gradient_doctor.hf import DoctorCallback

    return DoctorCallback(
        contract={"trainable": ["*lora_*"]} if config.lora is not None else None,
        mode=wanted.mode,
        trace_steps=wanted.trace_steps,
        every=wanted.every,
        raise_on=wanted.raise_on,
        report=False,  # its notes are in the file; what is worse is told with the summary
        json=json,
    )


def gradient_errors() -> tuple[type[Exception], ...]:
    """What a doctor raises to end a training."""
    if not installed():
        return ()
    from gradient_doctor.hf import GradientError

    return (GradientError,)


def looking_away(watcher: DoctorCallback | None) -> AbstractContextManager[Any]:
    """What happens inside is not the doctor's business."""
    doctor = None if watcher is None else watcher.doctor
    return nullcontext() if doctor is None else doctor.session.pause()


def summary_of(doctor: DoctorCallback | None) -> dict[str, Any]:
    """For the summary: whether gradients were examined, how many warnings and errors, and which."""
    if doctor is None:
        return {"examined": False, "findings": 0, "worst": []}
    from gradient_doctor.findings import Severity

    grave = [finding for finding in doctor.findings if finding.severity >= Severity.WARNING]
    worst = [finding.what for finding in grave[:3]]
    return {"examined": True, "findings": len(grave), "worst": worst}
