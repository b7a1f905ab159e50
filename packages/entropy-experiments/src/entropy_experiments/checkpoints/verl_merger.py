"""verl's own merger as a witness: does it make the same model of the ranks' files?

`python -m verl.model_merger` writes a checkpoint as bfloat16 safetensors, the adapter of a LoRA
beside its base. So every tensor put together here is rounded to bfloat16 and compared with verl's,
bit for bit; equal models have equal hashes

    sha256 over the tensors in the order of their names: name, shape, bytes in bfloat16.

The merger loads the files by unsafe pickle: run it on files that you trust. A folder that it wrote
elsewhere can be compared without it, and without verl.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from entropy_experiments.checkpoints.layout import ADAPTER_WEIGHTS, find_checkpoint
from entropy_experiments.checkpoints.rank_shards import RankWeights
from entropy_experiments.checkpoints.verl_folder import LORA
from entropy_experiments.checkpoints.verl_state import PEFT
from entropy_experiments.input_errors import InputError, expand_path, short

PATIENCE = 24 * 3600
"""Seconds for the merger, which reads the whole checkpoint."""


@dataclass(frozen=True, kw_only=True)
class MergerComparison:
    """One checkpoint, put together twice."""

    ours: str
    """sha256 of the tensors put together here."""
    theirs: str
    tensors: int
    different: tuple[str, ...]
    """Names of tensors with other numbers, or that only one of the two has."""

    @property
    def same(self) -> bool:
        return self.ours == self.theirs and not self.different

    def __str__(self) -> str:
        if self.same:
            return (
                f"verl's merger makes the same model: {self.tensors} tensors equal in bfloat16, "
                f"sha256 {self.ours[:16]}"
            )
        return (
            f"verl's merger makes another model: {len(self.different)} of {self.tensors} tensors "
            f"differ, such as {self.different[0]!r}; sha256 here {self.ours[:16]}, there "
            f"{self.theirs[:16]}. Do not use either before the cause is known: report it"
        )


def compare_with_merger(
    checkpoint: Path | str, *, merged: Path | str | None = None
) -> MergerComparison:
    """A verl checkpoint as it is read here against verl's own merger, in bfloat16.

    Args:
        checkpoint: `global_step_N`, or its `actor`.
        merged: A folder that `python -m verl.model_merger merge` wrote. None: verl's merger is run
            into a temporary folder; it must be installed, and loads the files by unsafe pickle.

    Returns:
        Both hashes, and the tensors that differ.

    Raises:
        ValueError: If the checkpoint is none of verl's, or the merger fails.
    """
    layout = find_checkpoint(checkpoint)
    if not isinstance(layout.stored, RankWeights):
        raise InputError(
            f"{layout.named} holds no model_world_size_*_rank_*.pt; expected a checkpoint of verl "
            "or SkyRL. Others have no merger to be compared with."
        )
    if merged is not None:
        return _compare(layout.stored, expand_path(merged, "--merged"))
    with tempfile.TemporaryDirectory(prefix="merged-") as folder:
        _run_merger(layout.weights, Path(folder))
        return _compare(layout.stored, Path(folder))


def _run_merger(shards: Path, target: Path) -> None:
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    command += ["--local_dir", str(shards), "--target_dir", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "it wrote nothing").splitlines()[-1]
        raise InputError(
            f"verl's merger failed on {shards} ({short(last)}). Expected verl to be installed in "
            "this environment; or merge elsewhere and give that folder: --merged FOLDER."
        )


def _compare(stored: RankWeights, folder: Path) -> MergerComparison:
    theirs = _merged_tensors(folder)
    names = {_mergers_name(name): name for name in stored}
    tied = _tied(stored, names, theirs)
    both = sorted((set(names) | set(theirs)) - tied)
    read = {name: lambda own=own: stored[own] for name, own in names.items()}
    different = tuple(
        name
        for name in both
        if name not in read
        or name not in theirs
        or not torch.equal(_rounded(read[name]()), _rounded(theirs[name]()))
    )
    return MergerComparison(
        ours=_hash((name, read[name]) for name in both if name in read),
        theirs=_hash((name, theirs[name]) for name in both if name in theirs),
        tensors=len(both),
        different=different,
    )


def _tied(
    stored: RankWeights, names: Mapping[str, str], theirs: Mapping[str, Callable[[], Tensor]]
) -> set[str]:
    """Names that the merger leaves out because their numbers are kept under another name."""
    kept = [names[name] for name in names if name in theirs]
    shapes = stored.shapes
    return {
        name
        for name, own in names.items()
        if name not in theirs
        and any(shapes[k] == shapes[own] and torch.equal(stored[k], stored[own]) for k in kept)
    }


def _merged_tensors(folder: Path) -> dict[str, Callable[[], Tensor]]:
    """By name, each read when it is asked for."""
    files = [*sorted(folder.glob("*.safetensors")), folder / LORA / ADAPTER_WEIGHTS[0]]
    tensors: dict[str, Callable[[], Tensor]] = {}
    for file in files:
        if not file.is_file():
            continue
        try:
            with safe_open(file, framework="pt") as held:
                names = list(held.keys())
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} cannot be read ({short(error)}). Merge again.") from error
        tensors |= {name: _reader(file, name) for name in names}
    if not tensors:
        raise InputError(
            f"{folder} holds no safetensors; expected what verl's merger wrote "
            "(--target_dir). Merge the checkpoint first."
        )
    return tensors


def _reader(file: Path, name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with safe_open(file, framework="pt") as held:
            return held.get_tensor(name)

    return read


def _mergers_name(name: str) -> str:
    """What the merger calls a tensor: the base's without peft's wrapping, the adapter's as peft."""
    if "lora_" in name:
        return name.replace(".default.weight", ".weight")
    return name.removeprefix(PEFT).replace(".base_layer.", ".")


def _hash(tensors: Iterable[tuple[str, Callable[[], Tensor]]]) -> str:
    total = hashlib.sha256()
    for name, read in tensors:
        value = _rounded(read())
        total.update(f"{name} {tuple(value.shape)} ".encode())
        total.update(value.contiguous().view(torch.int16).numpy().tobytes())
    return total.hexdigest()


def _rounded(value: Tensor) -> Tensor:
    return value.to(torch.bfloat16)
