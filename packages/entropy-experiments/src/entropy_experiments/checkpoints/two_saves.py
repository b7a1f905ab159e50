"""Notes on a checkpoint that holds the same thing in two forms, of which one was read.

Trainers do that rightly: under FSDP they save `pytorch_model_fsdp.bin` and the safetensors, or
shards and an adapter. So it is no error; but if a folder was saved into twice, or weights were
merged from shards of which newer ones were written since, nothing tells which of them is meant.
What the user named is meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from entropy_experiments.checkpoints.layout import (
    FSDP_WEIGHTS,
    OPTIMIZERS,
    SHARDED_OPTIMIZERS,
    STEP,
    Layout,
    is_sharded,
)
from entropy_experiments.checkpoints.sharded_state import holds_optimizer


def unread_forms(
    layout: Layout, *, adapter_path: Path | str | None, optimizer_path: Path | str | None
) -> tuple[str, ...]:
    """`adapter_path`, `optimizer_path`: as the user named them."""
    notes: list[str] = []
    if layout.sharded is None and adapter_path is None:
        notes += _note("weights", layout, layout.files[0], _shards(layout))
    if layout.optimizer is not None:
        read, named = layout.optimizer, None if optimizer_path is None else Path(optimizer_path)
        notes += _note("optimizers", layout, read, _optimizers(layout, read, named))
    return tuple(notes)


def _note(what: str, layout: Layout, read: Path, found: Iterator[Path]) -> Iterator[str]:
    others = [path for path in dict.fromkeys(found) if path != read]
    if others:
        words = ", ".join(_named(layout, path) for path in others)
        yield (
            f"which of two saved {what} is meant: {_named(layout, read)} was read; {words} was "
            "not, and may be of another save"
        )


def _named(layout: Layout, path: Path) -> str:
    name = str(path.relative_to(layout.root)) if path.is_relative_to(layout.root) else path.name
    return f"{name}/" if path.is_dir() else name


def _shards(layout: Layout) -> Iterator[Path]:
    """What an FSDP trainer saved of the model, beside weights that came first."""
    for folder in dict.fromkeys((layout.weights, layout.root)):
        if is_sharded(folder) and folder != layout.optimizer:
            yield folder
        for path in sorted(folder.iterdir()):
            # step_N is another checkpoint.
            foreign = path.name in SHARDED_OPTIMIZERS or STEP.search(path.name)
            if path.name in FSDP_WEIGHTS or (is_sharded(path) and not foreign):
                yield path


def _optimizers(layout: Layout, read: Path, named: Path | None) -> Iterator[Path]:
    if named is None:
        if layout.sharded is not None and holds_optimizer(layout.stored):
            yield layout.sharded
        folders = (layout.weights, layout.root)
    else:
        folders = () if named.name == read.name else (read.parent,)
    for folder in dict.fromkeys(folders):
        yield from (folder / name for name in OPTIMIZERS if (folder / name).is_file())
        yield from (folder / name for name in SHARDED_OPTIMIZERS if is_sharded(folder / name))
