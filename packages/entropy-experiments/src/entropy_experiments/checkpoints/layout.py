"""Which files make up a checkpoint, whoever wrote it.

| writer | weights | optimizer |
|---|---|---|
| HF Trainer, TRL | `checkpoint-N/` | `checkpoint-N/optimizer.pt` |
| older runs of this project | `step_N/model/` | `step_N/optimizer.pt` |
| Accelerate | `model.safetensors`, often without config.json | `optimizer.bin` |
| both, under FSDP | `pytorch_model_fsdp_0/` (DCP) or `pytorch_model_fsdp.bin` | `optimizer_0/` |
| torch.distributed.checkpoint | a folder with `.metadata`, or one inside | the same folder |
| prime-rl | `step_N/trainer/`, such a folder | the same folder |
| verl, SkyRL | `global_step_N/actor/`, `.../policy/`: a file per rank | the same folder |

Nothing but the table of contents of shards is loaded here. Formats that only unsafe pickle can read
(DeepSpeed, verl under FSDP1) are refused with the ways out; training_args.bin is never looked at.

A checkpoint may hold the same thing in two forms, of which one is read (`unread_forms` notes the
other). Trainers do that rightly: under FSDP they save `pytorch_model_fsdp.bin` and the safetensors,
or shards and an adapter. So it is no error; but if a folder was saved into twice, or weights were
merged from shards of which newer ones were written since, nothing tells which of them is meant.
What the user named is meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from entropy_experiments.checkpoints.verl_folder import (
    HF,
    LORA,
    LORA_META,
    MODEL,
    OPTIMIZER,
    POLICIES,
    find_rank_folder,
    first_rank_file,
    is_rank_file,
    rank_files,
)
from entropy_experiments.input_errors import expand_path, read_json_value, refuse_special_files
from entropy_experiments.results import TRAINER_STATE

if TYPE_CHECKING:
    from torch import Tensor


ADAPTER_CONFIG, MODEL_CONFIG = "adapter_config.json", "config.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
MODEL_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
OPTIMIZER_FILES = ("optimizer.pt", "optimizer.bin")
SHARDED_OPTIMIZERS = ("optimizer_0", "optimizer", "optim")
FSDP_WEIGHTS = ("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin")
PARAM_NAMES = "optimizer_param_names.json"
UPDATE_BATCH = "update_batch"
OF_RECORDS = {UPDATE_BATCH, "evaluation", "made_step"}
"""All that the callback keeps of a step in the folder of its record."""
INSIDE = ("model", "adapter", "adapter_model")
PRIME_RL = "trainer"
"""Where prime-rl keeps its DCP shards, beside the orchestrator's files."""
STEP = re.compile(r"(?:checkpoint|step|global_step)[-_]?(\d+)$")
EXPECTED = (
    f"{ADAPTER_CONFIG} with {ADAPTER_WEIGHTS[0]} (LoRA), or {MODEL_CONFIG} with {MODEL_WEIGHTS[0]} "
    "(full), here or in model/"
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where everything is; paths that are not None exist."""

    named: Path
    """As the user named it, for messages."""
    root: Path
    """The checkpoint's folder, resolved: step_N also where step_N/model was named."""
    weights: Path
    """The folder with the weights."""
    config: Path
    """The folder with their config: `weights`, but FSDP's may be in the run's folder."""
    kind: Literal["lora", "full"]
    files: tuple[Path, ...]
    """Weight files, all shards."""
    sharded: Path | None = None
    """Where the weights are if an FSDP trainer saved them: DCP's folder, one file of names, or the
    first of the ranks' files."""
    hf: Path | None = None
    """The folder with the model's config and tokenizer, where a trainer keeps them apart."""
    lora_meta: Path | None = None
    """verl's file of a LoRA's rank and alpha, where there is no adapter_config.json."""
    stored: Mapping[str, Tensor] | None = field(default=None, compare=False, repr=False)
    """These by name, each read when it is asked for: the table of contents is read once."""
    optimizer: Path | None
    """A file, or DCP's folder."""
    param_names: Path | None
    step: int | None
    recorded: Path | None

    @property
    def name(self) -> str:
        return self.root.name if self.step is None else f"step_{self.step}"

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where to look for facts, nearest first. What changes from one checkpoint to the next
        (step, optimizer, recorded batch) is never the run's, which comes last."""
        return tuple(dict.fromkeys((self.weights, self.root, self.root.parent)))


def find_checkpoint(
    path: Path | str,
    *,
    adapter_path: Path | str | None = None,
    optimizer_path: Path | str | None = None,
) -> Layout:
    named = expand_path(path, "The checkpoint")
    if named.is_file():
        named = named.parent
    if not named.is_dir():
        raise FileNotFoundError(
            f"Checkpoint not found: {named} is not a folder. Expected one with {EXPECTED}."
        )
    # Not of the root: what was converted into model/ lies below the shards it came from.
    _refuse_foreign(named)
    root, inside = _root(named)
    ranks = None if adapter_path is not None else _rank_folder(named)
    sharded = None if adapter_path is not None or ranks is not None else _sharded_weights(named)
    if ranks is not None:
        weights = ranks.resolve()
        root = weights.parent if weights.name in POLICIES else weights
        sharded = first_rank_file(weights, MODEL)
    elif sharded is not None:
        sharded = (inside or root) / sharded.relative_to(named)
        weights = sharded if sharded.is_dir() else sharded.parent
    elif adapter_path is not None:
        weights = _weights_folder(named, adapter_path).resolve()
    else:
        weights = (inside or root) / _weights_folder(named, None).relative_to(named)
    for folder in dict.fromkeys((weights, root)):
        refuse_special_files(folder)
    _refuse_half_written(weights)
    _refuse_half_written(root)
    stored = None
    if sharded is not None:
        from entropy_experiments.checkpoints.stored_weights import read_stored_weights

        stored = read_stored_weights(sharded)
        kind = "lora" if any("lora_" in name for name in stored) else "full"
        wanted = ADAPTER_CONFIG if kind == "lora" else MODEL_CONFIG
        apart = () if ranks is None else (weights / (LORA if kind == "lora" else HF),)
        config = _config_folder((*apart, weights, root, root.parent), wanted, root)
    else:
        kind = "lora" if (weights / ADAPTER_CONFIG).is_file() else "full"
        config = weights
    optimizer = _optimizer((named, root), weights, optimizer_path)
    hf = None if ranks is None else _first((weights / HF,))
    lora_meta = None if ranks is None else _first((weights / LORA_META,))
    if optimizer is None and stored is not None:
        from entropy_experiments.checkpoints.dcp_state import holds_optimizer  # needs torch

        optimizer = sharded if holds_optimizer(stored) else None
    # Of one DCP folder that is the whole checkpoint, the run's folder is not "beside".
    beside = root if optimizer is None or optimizer == root else optimizer.parent
    return Layout(
        named=named,
        root=root,
        weights=weights,
        config=config,
        kind=kind,
        files=files_of(sharded)
        if sharded is not None
        else _weight_files(weights, ADAPTER_WEIGHTS if kind == "lora" else MODEL_WEIGHTS),
        sharded=sharded,
        stored=stored,
        hf=hf,
        lora_meta=None if (config / ADAPTER_CONFIG).is_file() else lora_meta,
        optimizer=optimizer,
        param_names=_first(folder / PARAM_NAMES for folder in (beside, root, weights)),
        step=_step(root, weights),
        recorded=_first(
            (
                weights / UPDATE_BATCH,
                root / UPDATE_BATCH,
                root.parent / "update_batches" / root.name,
            )
        ),
    )


def missing_optimizer(layout: Layout) -> FileNotFoundError:
    return FileNotFoundError(
        f"No optimizer state for {layout.named}: expected {' or '.join(OPTIMIZER_FILES)} (FSDP: "
        f"{SHARDED_OPTIMIZERS[0]}/) there or by the weights. Without it there is no momentum and "
        "the step is another one: set checkpoint.optimizer to the file, or save checkpoints "
        "without `save_only_model`."
    )


def is_sharded(folder: Path) -> bool:
    """Whether torch.distributed.checkpoint wrote it, whole or in part."""
    return folder.is_dir() and ((folder / ".metadata").exists() or any(folder.glob("*.distcp")))


def files_of(path: Path) -> tuple[Path, ...]:
    """A file, the files of every rank, or those of a DCP folder."""
    if is_rank_file(path):
        return rank_files(path)
    return (*sorted(path.glob("*.distcp")), path / ".metadata") if path.is_dir() else (path,)


def read_json(path: Path) -> dict[str, Any]:
    content = read_json_value(
        path,
        advice="The file was truncated or edited by hand: restore it, or use an earlier checkpoint",
    )
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected a JSON object.")
    return content


def _root(named: Path) -> tuple[Path, Path | None]:
    """(the checkpoint's folder, the weights' if that one was named), as `.` and links resolve."""
    # First unresolved: step_N/model may be a link to weights kept elsewhere.
    for folder in (named.absolute(), named.resolve()):
        parent = folder.parent.resolve()
        inside = folder.name in (*INSIDE, FSDP_WEIGHTS[0], PRIME_RL)
        if inside and _is_outer(parent, is_sharded(folder)):
            return parent, parent / folder.name
    return named.resolve(), None


def _is_outer(folder: Path, around_shards: bool) -> bool:
    """Whether a folder is a checkpoint around its weights, rather than the parent of many."""
    # Beside shards, the adapter's config is theirs.
    own = (*(() if around_shards else (ADAPTER_CONFIG,)), *ADAPTER_WEIGHTS, *MODEL_WEIGHTS)
    if _first(folder / name for name in own):
        return False  # It has weights of its own: those inside are others.
    kept = (*OPTIMIZER_FILES, SHARDED_OPTIMIZERS[0], PARAM_NAMES, TRAINER_STATE, UPDATE_BATCH)
    return bool(STEP.search(folder.name)) or bool(_first(folder / name for name in kept))


def _weights_folder(root: Path, adapter_path: Path | str | None) -> Path:
    if adapter_path is not None:
        folder = _as_folder(adapter_path, root)
        if not _has_weights(folder):
            raise FileNotFoundError(
                f"Checkpoint not found: checkpoint.adapter is {folder}, which has none of the "
                f"expected files. Expected {EXPECTED}."
            )
        return folder
    for folder in (root, *(root / name for name in INSIDE)):
        if _has_weights(folder):
            return folder
    hint = _checkpoints_in(root)
    raise FileNotFoundError(
        f"Checkpoint not found: {root} has none of the expected files. Expected {EXPECTED}.{hint}"
    )


def _checkpoints_in(run: Path) -> str:
    """Of a run's folder: the checkpoints that it holds, those with a recorded step by name."""
    steps = {p: int(m[1]) for p in run.iterdir() if p.is_dir() and (m := STEP.search(p.name))}
    inside = sorted(steps, key=lambda p: (steps[p], p.name))
    batches = [p for p in inside if is_record(p)]
    inside = [p for p in inside if p not in batches]
    if not inside:
        return (
            f" It holds what training recorded of {_few([p.name for p in batches])}: weights are "
            "in the run's checkpoints, give one of those."
            if batches
            else ""
        )
    recorded = [p.name for p in inside if (p / UPDATE_BATCH).is_dir()]
    also = f" The step that followed is recorded in {_few(recorded)}." if recorded else ""
    return f" It holds {_few([p.name for p in inside])}: give one of those.{also}"


def is_record(folder: Path) -> bool:
    """Whether it holds what was recorded of a step, and no weights."""
    held = {path.name for path in folder.iterdir()}
    return UPDATE_BATCH in held and held <= OF_RECORDS


def _few(names: list[str]) -> str:
    """The last ones, where there are many."""
    return ", ".join(("...", *names[-8:]) if len(names) > 8 else names)


def _sharded_weights(named: Path) -> Path | None:
    """What an FSDP trainer saved, where nothing else is there to read (or see `unread_forms`)."""
    plain = (*ADAPTER_WEIGHTS, *MODEL_WEIGHTS)
    if _first(folder / n for folder in (named, *(named / i for i in INSIDE)) for n in plain):
        return None
    if is_sharded(named):
        return named
    weights = [named / name for name in FSDP_WEIGHTS if (named / name).exists()]
    if len(weights) > 1:
        raise ValueError(
            f"{named} holds the weights twice, in {FSDP_WEIGHTS[0]}/ and {FSDP_WEIGHTS[1]}; "
            "expected one of them: they may be of two saves. Move the one that you do not mean "
            f"elsewhere, or give {weights[0]} for the shards."
        )
    if weights:
        return weights[0]
    sharded = [p for p in sorted(named.iterdir()) if is_sharded(p)]
    others = [p for p in sharded if p.name not in SHARDED_OPTIMIZERS]
    if len(others) > 1:
        raise ValueError(
            f"{named} holds DCP shards in {', '.join(p.name for p in others)}; expected one folder "
            "with the model. Name that one, and its optimizer as checkpoint.optimizer."
        )
    return others[0] if others else None


def _config_folder(places: tuple[Path, ...], name: str, otherwise: Path) -> Path:
    """Sharded weights have no config of their own; it is beside them, or in the run's folder."""
    config = _first(folder / name for folder in places)
    return otherwise if config is None else config.parent


def _rank_folder(named: Path) -> Path | None:
    """The folder with verl's or SkyRL's files, unless weights of another form were put there."""
    folder = find_rank_folder(named)
    plain = (*ADAPTER_WEIGHTS, *MODEL_WEIGHTS)
    return None if folder is None or _first(named / name for name in plain) else folder


def _has_weights(folder: Path) -> bool:
    config = folder / ADAPTER_CONFIG
    if config.is_file():
        if not any((folder / name).is_file() for name in ADAPTER_WEIGHTS):
            raise FileNotFoundError(
                f"Checkpoint not found: {folder} has {ADAPTER_CONFIG} but no weights. Expected "
                f"{ADAPTER_WEIGHTS[0]} beside it; the folder is half-written or was pruned."
            )
        return True
    adapter = _first(folder / name for name in ADAPTER_WEIGHTS)
    if adapter is not None:
        raise FileNotFoundError(
            f"Checkpoint not found: {adapter} has no {ADAPTER_CONFIG} beside it. Expected both: "
            "rank and alpha are in the config alone."
        )
    return any((folder / name).is_file() for name in MODEL_WEIGHTS)


def _weight_files(folder: Path, names: tuple[str, ...]) -> tuple[Path, ...]:
    first = next(folder / name for name in names if (folder / name).is_file())
    if not first.name.endswith(".index.json"):
        return (first,)
    shards = read_json(first).get("weight_map", {})
    listed = list(shards.values()) if isinstance(shards, dict) else [None]
    strange = sorted({str(name) for name in listed if not _plain_name(name)})
    if strange:
        raise ValueError(
            f"{first} names the shards {strange[:3]}; expected a weight_map to names of files "
            "beside it. Nothing outside the folder is read: copy the checkpoint again."
        )
    files = tuple(folder / name for name in sorted(set(shards.values())))
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise FileNotFoundError(
            f"{first} names {len(files)} shards of which {missing} are missing. Expected all of "
            "them beside it; the folder is half-written or was copied in part."
        )
    return files


def _plain_name(name: Any) -> bool:
    """Of a file in the same folder; what other systems use to separate folders counts too."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _refuse_half_written(folder: Path) -> None:
    """The Trainer writes trainer_state.json last, and its folders are not atomic."""
    if not re.fullmatch(r"checkpoint-\d+", folder.name):
        return
    state = folder / TRAINER_STATE
    if not state.is_file():
        raise FileNotFoundError(
            f"{folder} is half-written: {TRAINER_STATE}, which the Trainer writes last, is "
            "missing. Training stopped while saving: use an earlier checkpoint."
        )
    step, named = read_json(state).get("global_step"), int(folder.name.partition("-")[2])
    if isinstance(step, int) and step != named:
        raise ValueError(
            f"{state} says global_step {step}, and its folder is {folder.name}; expected the same "
            "step. Files of two checkpoints were mixed, or the folder was renamed: copy the "
            f"checkpoint again, or name it checkpoint-{step}."
        )


def _refuse_foreign(root: Path) -> None:
    shards = _first(
        path
        for pattern in ("zero_pp_rank_*", "mp_rank_*", "*/zero_pp_rank_*", "global_step*")
        for path in root.glob(pattern)
        if not _is_rank_checkpoint(path)  # verl and SkyRL name theirs so, too
    )
    # A Trainer under DeepSpeed may leave readable weights beside shards; both are then needed.
    readable = _first(root / name for name in (*ADAPTER_WEIGHTS, *MODEL_WEIGHTS))
    if shards is not None and not (readable and _first(root / name for name in OPTIMIZER_FILES)):
        raise ValueError(
            f"{root} holds DeepSpeed shards ({shards.name}), which only unsafe pickle can read. "
            f"Convert the weights: python {root}/zero_to_fp32.py {root} {root}/model "
            "--safe_serialization; the optimizer: python -m deepspeed.checkpoint.ds_to_universal "
            f"--input_folder {root} --output_folder {root}/universal, collected by name into one "
            "optimizer.pt."
        )
    alone = _first(root.glob("pytorch_model_fsdp*_rank*.bin"))
    if alone is not None:
        raise ValueError(
            f"{root} holds one file of each rank's own ({alone.name}), which only that rank can "
            "read. Save with state_dict_type SHARDED_STATE_DICT through DCP (use_dcp, the default) "
            "or FULL_STATE_DICT."
        )


def _is_rank_checkpoint(path: Path) -> bool:
    inside = any((path / name).is_dir() for name in POLICIES)
    return inside or first_rank_file(path, MODEL) is not None


def _optimizer(folders: tuple[Path, Path], weights: Path, named: Path | str | None) -> Path | None:
    """`folders`: the one named and the checkpoint's own."""
    if named is not None:
        path = expand_path(named, "checkpoint.optimizer")
        if not path.exists():
            path = _first(folder / path for folder in folders) or path
        optimizer = path if path.is_file() else _optimizer_in([path])
        if optimizer is None and is_sharded(path):
            optimizer = path
        if optimizer is None:
            raise FileNotFoundError(
                f"Optimizer not found: checkpoint.optimizer is {path}. Expected a file, or a "
                f"folder with {', '.join(OPTIMIZER_FILES)} or {SHARDED_OPTIMIZERS[0]}/ (FSDP's "
                "shards)."
            )
        return optimizer
    searched = [weights, folders[1]]
    if weights.name in INSIDE and weights.parent != folders[1].parent:
        searched.append(weights.parent)
    return _optimizer_in(searched)


def _optimizer_in(folders: list[Path]) -> Path | None:
    files = (folder / name for folder in folders for name in OPTIMIZER_FILES)
    shards = (folder / name for folder in folders for name in SHARDED_OPTIMIZERS)
    ranks = (folder / name for folder in folders for name in (".", *POLICIES))
    return (
        _first(files)
        or _first(path for path in shards if is_sharded(path))
        or next((path for f in ranks if (path := first_rank_file(f, OPTIMIZER))), None)
    )


def _as_folder(path: Path | str, root: Path) -> Path:
    folder = expand_path(path, "checkpoint.adapter")
    if not folder.exists() and (root / folder).exists():
        folder = root / folder
    return folder.parent if folder.is_file() else folder


def _step(root: Path, weights: Path) -> int | None:
    state = _first(folder / TRAINER_STATE for folder in (weights, root))
    if state is not None:
        step = read_json(state).get("global_step")
        if isinstance(step, int):
            return step
    for folder in (root, weights.resolve(), weights.resolve().parent):
        match = STEP.search(folder.name)
        if match:
            return int(match[1])
    return None


def _first(paths: Iterator[Path] | tuple[Path, ...] | Any) -> Path | None:
    return next((path for path in paths if path.exists()), None)


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


def _note(what: str, layout: Layout, read: Path, candidates: Iterator[Path]) -> Iterator[str]:
    others = [path for path in dict.fromkeys(candidates) if path != read]
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
        from entropy_experiments.checkpoints.dcp_state import holds_optimizer  # needs torch

        if layout.sharded is not None and holds_optimizer(layout.stored):
            yield layout.sharded
        folders = (layout.weights, layout.root)
    else:
        folders = () if named.name == read.name else (read.parent,)
    for folder in dict.fromkeys(folders):
        yield from (folder / name for name in OPTIMIZER_FILES if (folder / name).is_file())
        yield from (folder / name for name in SHARDED_OPTIMIZERS if is_sharded(folder / name))
