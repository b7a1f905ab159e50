"""Where checkpoints are: the embedded default, the steps of a run, the one that follows.

The number in a folder's name counts optimizer steps (`checkpoint-N`, `step_N`), but for verl's and
SkyRL's `global_step_N`, which counts batches: of each they may make several steps. What a record
beside the weights says (`training_record`) comes before any name.
"""

from __future__ import annotations

import platform
import re
import subprocess
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

from entropy_experiments.checkpoints.layout import is_record
from entropy_experiments.checkpoints.training_record import read_record

_NUMBERED = re.compile(r"(checkpoint-|step_|global_step_)(\d+)")
EMBEDDED = "embedded"
LIBRARIES = ("torch", "transformers", "peft", "numpy", "scipy")


def embedded_trajectory() -> Path:
    """The run shipped with the package: a small policy whose entropy collapses under GRPO.

    Returns:
        The folder with its base model and its checkpoints.

    Raises:
        FileNotFoundError: If the installation has no such folder.

    Examples:
        >>> (embedded_trajectory() / "checkpoint-13" / "optimizer.pt").is_file()
        True
    """
    folder = Path(str(files("entropy_experiments") / EMBEDDED))
    if not checkpoints_by_step(folder):
        raise FileNotFoundError(
            f"The embedded default is missing from {folder}; expected checkpoint-0 and the steps "
            "after it. Install the package again, or name a checkpoint."
        )
    return folder


DEFAULT_STEP = 13
"""Of the embedded trajectory: mid-collapse, where momentum and batch both matter."""


def default_checkpoint() -> Path:
    return embedded_trajectory() / f"checkpoint-{DEFAULT_STEP}"


def packaged_checkpoint(path: str | Path) -> Path:
    """`embedded/checkpoint-N`: of the run in the package, unless there is such a folder here."""
    path = Path(path)
    if path.parts[:1] != (EMBEDDED,) or path.exists():
        return path
    folder = embedded_trajectory()
    checkpoint = folder.joinpath(*path.parts[1:])
    if not checkpoint.is_dir() or checkpoint == folder:
        raise FileNotFoundError(
            f"Checkpoint not found: {path}; the run in the package has {EMBEDDED}/checkpoint-0 to "
            f"{EMBEDDED}/{checkpoints_by_step(folder)[-1].name}, and there is no such folder here."
        )
    return checkpoint


def checkpoints_by_step(folder: Path) -> list[Path]:
    """The checkpoints in a run's folder, in the order of their steps."""
    if not folder.is_dir():
        return []
    numbered = [
        (int(match[2]), path)
        for path in folder.iterdir()
        if (match := _NUMBERED.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(numbered)]


def checkpoints_by_count(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by how many optimizer steps were made before each, in that order.

    Where the records beside some count otherwise than the folders' names, one without a record has
    no place in the order, and is left out.
    """
    paths = [path for path in checkpoints_by_step(folder) if not is_record(path)]
    named = {path: int(path.name.rpartition("-" if "-" in path.name else "_")[2]) for path in paths}
    counted = {path: recorded_step_count(path) for path in paths}
    if any(count not in (None, named[path]) for path, count in counted.items()):
        named = {path: count for path, count in counted.items() if count is not None}
    return {count: path for path, count in sorted(named.items(), key=lambda item: item[1])}


def number_of(checkpoint: Path) -> int | None:
    """The number in the name of a checkpoint's folder, or of the one that it is a part of
    (step_N/trainer, global_step_N/actor); None: there is none."""
    for folder in (checkpoint, checkpoint.parent):
        if match := _NUMBERED.fullmatch(folder.name):
            return int(match[2])
    return None


def next_checkpoint(checkpoint: Path) -> Path | None:
    """The checkpoint one step later, if it was kept."""
    if checkpoint.name == "model":  # step_N/model, the earlier scripts' adapter folder
        checkpoint = checkpoint.parent
    match = _NUMBERED.fullmatch(checkpoint.name)
    if match is None:
        return None
    later = checkpoint.with_name(f"{match[1]}{int(match[2]) + 1}")
    if not later.is_dir():
        return None
    steps = [recorded_step_count(folder) for folder in (checkpoint, later)]
    known = [step for step in steps if step is not None]
    return None if len(known) == 2 and known[1] != known[0] + 1 else later


def recorded_step_count(checkpoint: Path) -> int | None:
    """Optimizer steps made before a checkpoint, as recorded beside it; None: nothing says so."""
    record = read_record((checkpoint,))
    return None if record is None else record.step


def provenance() -> dict[str, Any]:
    """Versions that a result depends on."""
    return {
        "entropy_experiments": _version("entropy-experiments"),
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
        "git": _git_hash(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git_hash() -> str | None:
    """Of the package's own repository, when it is run from one."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
