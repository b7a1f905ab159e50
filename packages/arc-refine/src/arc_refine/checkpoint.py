"""Checkpoints that continue bit for bit.

A checkpoint is a folder `checkpoints/step_000050` with

    weights.safetensors   parameters and buffers of all networks (the EMA of colours too)
    state.pt              optimizers, gradient scaler, random state; read with weights_only=True
    state.json            step, epoch, batch, configuration, and the size of the other two files

It is written under a temporary name and renamed, so a kill leaves either all of it or none; sizes
are checked on reading, should a disk have lost the end of a file. Data order, augmentation and
refinement noise need no state: their generators are made from (seed, epoch, batch).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from arc_refine.metrics import write_whole

FOLDER, LATEST = "checkpoints", "latest"
WEIGHTS, STATE, FACTS = "weights.safetensors", "state.pt", "state.json"


def save_checkpoint(
    run: Path, *, step: int, weights: Mapping[str, Tensor], state: Any, facts: Mapping[str, Any]
) -> Path:
    """Write one, make it the latest, and give its folder."""
    home = run / FOLDER
    home.mkdir(parents=True, exist_ok=True)
    target = home / f"step_{step:06d}"
    temporary = home / f".{target.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    # safetensors refuses two names for one memory (tied weights): each gets its own copy
    save_file({k: v.detach().cpu().clone().contiguous() for k, v in weights.items()},
              temporary / WEIGHTS)  # fmt: skip
    torch.save(state, temporary / STATE)
    sizes = {name: (temporary / name).stat().st_size for name in (WEIGHTS, STATE)}
    write_whole(temporary / FACTS, json.dumps({"step": step, **facts, "sizes": sizes}, indent=2))
    for name in (WEIGHTS, STATE):
        _to_disk(temporary / name)
    if target.exists():  # a resumed run comes by here again, with the same bits
        shutil.rmtree(target)
    temporary.rename(target)
    write_whole(home / LATEST, target.name + "\n")
    return target


def find_checkpoint(run: Path) -> Path:
    """The latest whole checkpoint of a run; half-written ones are passed over."""
    home = run / FOLDER
    named = home / LATEST
    candidates = [home / named.read_text("utf-8").strip()] if named.is_file() else []
    candidates += sorted(home.glob("step_*"), reverse=True)
    for folder in candidates:
        if not _broken(folder):
            return folder
    seen = f" {candidates[0].name}: {_broken(candidates[0])}." if candidates else ""
    raise ValueError(
        f"{run} has no whole checkpoint to read.{seen} A run writes its first one after "
        "--checkpoint-every steps or at the end of its first epoch; begin it again."
    )


def load_checkpoint(folder: Path, device: str = "cpu") -> tuple[dict[str, Tensor], Any, dict]:
    """(weights, state, facts); a half-written folder is refused."""
    wrong = _broken(folder)
    if wrong:
        raise ValueError(
            f"{folder} is no whole checkpoint: {wrong}. Use an earlier one of the same run."
        )
    facts = json.loads((folder / FACTS).read_text("utf-8"))
    weights = load_file(folder / WEIGHTS, device=device)
    # random states stay on the CPU; optimizers move their own state to their parameters
    state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    return weights, state, facts


def _broken(folder: Path) -> str | None:
    """What is wrong with it, in words; None for a whole one."""
    if not (folder / FACTS).is_file():
        return f"{FACTS} is missing"
    try:
        sizes = json.loads((folder / FACTS).read_text("utf-8"))["sizes"]
    except (ValueError, KeyError):
        return f"{FACTS} cannot be read"
    for name in (WEIGHTS, STATE):
        if not (folder / name).is_file():
            return f"{name} is missing"
        got = (folder / name).stat().st_size
        if got != sizes[name]:
            return f"{name} has {got} bytes, expected {sizes[name]}"
    return None


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
