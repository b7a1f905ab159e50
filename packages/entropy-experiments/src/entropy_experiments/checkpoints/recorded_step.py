"""The step that training made, as far as it is recorded beside its batch.

    made_step/fingerprint.json      step, learning rate, and sketches (`numerics.sketch`) of g, as
                                    the optimizer saw it, of theta_before, just before it stepped,
                                    and of theta_after - theta_before
    made_step/gradient.safetensors  g itself, where it is small enough or was asked for; its sha256
                                    is in fingerprint.json

The frozen weights below an adapter have a fingerprint, too: another base is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as dump_tensors
from torch import Tensor

from entropy_experiments.artifacts import sha256
from entropy_experiments.checkpoints.layout import read_json
from entropy_experiments.checkpoints.training_record import BaseFingerprint, BaseLocation
from entropy_experiments.numerics.sketch import BUCKETS, Fingerprint, sketch
from entropy_experiments.types import Params

MADE_STEP = "made_step"
"""Folder beside a recorded batch: fingerprint.json and perhaps gradient.safetensors."""
FINGERPRINT_FILE, GRADIENT_FILE = "fingerprint.json", "gradient.safetensors"
STEP_SCHEMA = 1
GRADIENT_TOLERANCE = 1e-6
"""The gradient beside a fingerprint must be the one that it is of."""
BASE_ELEMENTS = 4096
"""Of each frozen parameter, spread over it: enough to tell one base from another."""
BASE_TOLERANCE = 0.01
"""Rounding of the whole base to bf16 is 0.2 %; another base is 100 %."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedStep:
    """What is known of a step that training made: fingerprints, and perhaps the gradient."""

    folder: Path
    step: int
    lr: float
    gradient: Fingerprint
    without_gradient: tuple[str, ...]
    """Parameters that had none: the optimizer left them alone."""
    change: Tensor | None
    """Sketch of theta_after - theta_before; None: the run ended before it was known."""
    before: Tensor | None = None
    """Sketch of theta_before; None: a version before this one recorded the step."""
    gradient_sha256: str | None = None
    """Of the file; None: not recorded, and the sketch alone must do."""

    @property
    def has_gradient(self) -> bool:
        return (self.folder / GRADIENT_FILE).is_file()

    def as_json(self) -> bytes:
        """The content of fingerprint.json."""
        content = {
            "schema": STEP_SCHEMA,
            "step": self.step,
            "lr": self.lr,
            "gradient": self.gradient.as_json(),
            "without_gradient": list(self.without_gradient),
            "change": None if self.change is None else self.change.tolist(),
        }
        if self.before is not None:
            content["before"] = self.before.tolist()
        if self.gradient_sha256 is not None:
            content["gradient_sha256"] = self.gradient_sha256
        return json.dumps(content, indent=1, allow_nan=False).encode()

    def load_gradient(self, params: Params) -> dict[str, Tensor]:
        """g by the policy's names, on its devices; refused if it is not the fingerprint's."""
        file = self.folder / GRADIENT_FILE
        try:
            gradient = load_file(file)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{file} cannot be read ({error}). Copy it again, or delete it."
            ) from (error)
        expected = {n: tuple(p.shape) for n, p in params.items() if n not in self.without_gradient}
        got = {name: tuple(value.shape) for name, value in gradient.items()}
        if got != expected:
            odd = sorted({*got.items()} ^ {*expected.items()})[:4]
            raise ValueError(
                f"{file} does not hold the gradient of this policy: {odd} differ. It belongs to "
                "another model; delete it to go on without it."
            )
        if self.gradient_sha256 is not None and sha256(file) != self.gradient_sha256:
            raise ValueError(
                f"{file} is not the gradient that was recorded: its sha256 differs from the one in "
                f"{FINGERPRINT_FILE}. Copy it again, or delete it."
            )
        apart = Fingerprint.of(gradient).distance(self.gradient)
        if not apart <= GRADIENT_TOLERANCE:
            raise ValueError(
                f"{file} is not the gradient that was recorded: it is {apart:.2g} of its size away "
                f"from its fingerprint in {FINGERPRINT_FILE}. Copy it again, or delete it."
            )
        return {name: value.to(params[name].device) for name, value in gradient.items()}


def read_recorded_step(folder: Path) -> RecordedStep | None:
    """What is beside a recorded batch; None: nothing."""
    file = folder / FINGERPRINT_FILE
    if not file.is_file():
        return None
    content = read_json(file)
    if content.get("schema") != STEP_SCHEMA:
        raise ValueError(
            f"{file} has schema {content.get('schema')!r}; this version reads {STEP_SCHEMA}. "
            f"Delete {folder} to go on without the fingerprint."
        )
    change, before = content.get("change"), content.get("before")
    return RecordedStep(
        folder=folder,
        step=int(content["step"]),
        lr=float(content["lr"]),
        gradient=Fingerprint.from_json(content["gradient"]),
        without_gradient=tuple(content["without_gradient"]),
        change=None if change is None else torch.tensor(change, dtype=torch.float64),
        before=None if before is None else torch.tensor(before, dtype=torch.float64),
        gradient_sha256=content.get("gradient_sha256"),
    )


def gradient_bytes(gradient: Params) -> bytes:
    return dump_tensors({n: g.detach().cpu().contiguous() for n, g in gradient.items()})


def base_fingerprint(model: Any) -> BaseFingerprint | None:
    """Of the frozen weights, by an even sample of each; None: nothing is frozen, or quantised."""
    frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    if not frozen or not all(p.is_floating_point() for p in frozen.values()):
        return None
    return {"elements": sum(p.numel() for p in frozen.values()), "sketch": _sampled(frozen)}


def base_location(model: Any) -> BaseLocation | None:
    """Where the base below an adapter was: the name that it was loaded by and, if that was a local
    folder, which one. None: there is no adapter, or the base has no name."""
    configs = getattr(model, "peft_config", None)
    if not configs:
        return None
    name = next(iter(configs.values())).base_model_name_or_path
    if not name:
        return None
    # The name is relative to the folder in which training runs, which is the one at hand.
    folder = Path(name).expanduser()
    return {"name": str(name), "folder": str(folder.resolve()) if folder.is_dir() else None}


def _sampled(frozen: Mapping[str, Tensor]) -> list[float]:
    sampled = {}
    for name, value in frozen.items():
        flat = value.detach().reshape(-1)
        sampled[name] = flat[:: max(1, flat.numel() // BASE_ELEMENTS)]
    return sketch(sampled).tolist()


def refuse_other_base(model: Any, recorded: BaseFingerprint, words: str) -> str | None:
    """Why the base cannot be compared; an error if it is another than training's."""
    fingerprint = base_fingerprint(model)
    if fingerprint is None or fingerprint["elements"] != recorded["elements"]:
        return "base: its frozen weights cannot be compared with the record's fingerprint"
    theirs, ours = (torch.tensor(x["sketch"], dtype=torch.float64) for x in (recorded, fingerprint))
    assert len(theirs) == BUCKETS
    apart = float((ours - theirs).norm() / theirs.norm()) if bool(theirs.any()) else 0.0
    if apart > BASE_TOLERANCE:
        raise ValueError(
            f"The base under this adapter ({words}) is not the one that training used: their "
            f"weights are {apart:.0%} apart. Set checkpoint.base to the base of the training."
        )
    return None
