"""A checkpoint on disk becomes a model, a tokenizer, an optimizer's memory and what is known.

Anything that would silently be another model is refused before any compute: NaN, missing, extra or
misshapen tensors, unknown config keys, an optimizer that does not fit. What the files cannot tell
is listed in `not_verifiable`. Loading leaves the global RNG and default dtype as they were.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open

from entropy_experiments.artifacts import sha256
from entropy_experiments.checkpoints.adapter import (
    SKETCH_NOTE,
    AdapterConfig,
    adapter_config_file,
    adapter_notes,
    load_adapter,
    read_adapter_config,
    refuse_random_base,
)
from entropy_experiments.checkpoints.base import (
    Base,
    check_finite_weights,
    check_index,
    check_loaded,
    check_safetensors,
    deciding_files,
    find_base,
    generation_config,
    load_causal_lm,
    load_tokenizer,
    model_config,
    tokenizer_folders,
)
from entropy_experiments.checkpoints.dcp import newer_shards
from entropy_experiments.checkpoints.layout import (
    MODEL_CONFIG,
    TRAINER_STATE,
    UPDATE_BATCH,
    Layout,
    files_of,
    find_checkpoint,
    missing_optimizer,
    unread_forms,
)
from entropy_experiments.checkpoints.optimizer_state import read_optimizer_state
from entropy_experiments.checkpoints.rank_shards import RankWeights
from entropy_experiments.checkpoints.recorded_step import MADE_STEP, refuse_other_base
from entropy_experiments.checkpoints.runs import number_of
from entropy_experiments.checkpoints.stored_weights import (
    carries_base,
    load_sharded_causal_lm,
    make_causal_lm,
    place_on_devices,
    restore_doubles,
    shapes_of,
    take_base,
)
from entropy_experiments.checkpoints.torch_files import load_safely
from entropy_experiments.checkpoints.training_facts import ReadFacts, read_facts
from entropy_experiments.checkpoints.training_record import TrainingRecord, read_record
from entropy_experiments.checkpoints.verl_folder import is_rank_file
from entropy_experiments.distributed import Ranks
from entropy_experiments.input_errors import short
from entropy_experiments.models.precision import true_float64
from entropy_experiments.models.sharded import ShardedModel, check_torch, in_one_process, mesh_of
from entropy_experiments.types import OptimizerState

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """Everything read from a checkpoint; `model` is in eval mode, and what training moves requires
    a gradient."""

    model: Any
    tokenizer: Any
    kind: Literal["lora", "full"]
    step: int | None
    """Optimizer steps made before it, as recorded, or by the folder's name."""
    path: Path
    name: str
    """For log files: step_N, or the folder's name where that counts something else."""
    base: str
    """Which base, and in which precision, in words."""
    optimizer: OptimizerState | None
    lr: float | None
    """The stored rate of the *next* step; 0 after the last step of a schedule."""
    facts: ReadFacts
    fact_sources: Mapping[str, str]
    coverage: Mapping[str, Any]
    not_verifiable: tuple[str, ...]
    recorded: Path | None
    """Folder of a recorded update batch."""
    optimizer_path: Path | None
    hashes: Mapping[str, str]
    """sha256 of every file read."""
    weights: tuple[str, ...] = ()
    """Of `hashes`, the files that hold the checkpoint's own weights."""
    record: TrainingRecord | None = None
    """What the run recorded about itself, if it did."""

    @property
    def optimizer_count(self) -> int:
        """Steps that the optimizer has counted: a parameter without gradients counts fewer."""
        return int(max(self.coverage.get("steps", ()), default=0))

    @property
    def other_count(self) -> str:
        """Why the optimizer's state may be another step's than the weights'; empty: it is theirs.

        The number in a folder's name is no count of steps: Accelerate numbers what it saves.
        """
        path, count = self.optimizer_path, self.optimizer_count
        counted = any(Path(name).name == TRAINER_STATE for name in self.hashes)
        if path is None or not counted or self.step is None or count == self.step:
            return ""
        if self.record is not None and self.record.covers(path):
            return ""  # compared with the sha256 of the one that was saved with the weights
        cause = "it is of a later step, or was carried over from an earlier training"
        if count < self.step:
            cause = "it is of an earlier step, or steps were skipped or its state was lost"
        return (
            f"{path.name} counts {count} steps and {TRAINER_STATE} {self.step}: {cause}. Use the "
            "optimizer that was saved with these weights"
        )


def load_checkpoint(
    path: Path | str,
    *,
    base: str | Path | None = None,
    backbone: str | None = None,
    adapter_path: Path | str | None = None,
    optimizer_path: Path | str | None = None,
    dtype: str = "auto",
    device_map: Any = "auto",
    need_optimizer: bool = True,
    read_optimizer: bool = True,
    quantise: bool = True,
) -> Checkpoint:
    """A checkpoint as HF Trainer, TRL, Accelerate, verl, SkyRL and prime-rl save it.

    Args:
        path: The checkpoint's folder.
        base: Base model of an adapter: a folder, or a name that the hub's cache has. None: as the
            checkpoint says.
        backbone: "smollm2", or another name that `load_base_model` knows.
        adapter_path: Another place of the adapter.
        optimizer_path: Another place of the optimizer's state.
        dtype: "auto" as stored, or float32, float64, bfloat16, float16.
        device_map: As of transformers.
        need_optimizer: Refuse a checkpoint without optimizer state.
        read_optimizer: False for those who need the weights alone; the state may be twice their
            size.
        quantise: False: a base that training had in 4 or 8 bit is loaded in floating point all the
            same, since a model cut over ranks cannot be quantised.

    Returns:
        Everything read; the model is in eval mode, and what training moves requires a gradient.

    Raises:
        FileNotFoundError: If a file is missing; the message names it and where it was looked for.
        ValueError: If files do not fit together.

    Examples:
        >>> checkpoint = load_checkpoint(embedded_trajectory() / "checkpoint-13")
        >>> checkpoint.kind, checkpoint.step, checkpoint.lr
        ('lora', 13, 0.003)
    """
    if dtype not in ("auto", *DTYPES):
        raise ValueError(
            f"checkpoint.dtype is {dtype!r}; expected auto, {', '.join(DTYPES)}. Choose one."
        )
    _check_device(device_map)
    layout = find_checkpoint(path, adapter_path=adapter_path, optimizer_path=optimizer_path)
    if not read_optimizer:
        layout = replace(layout, optimizer=None, param_names=None)
    elif need_optimizer and layout.optimizer is None:
        raise missing_optimizer(layout)
    facts, sources, fact_files = read_facts(layout.folders)
    record = read_record(layout.folders)
    name = layout.name
    if record is not None and record.path.parent == layout.root and record.step is not None:
        name = name if record.step == layout.step else layout.root.name
        layout = replace(layout, step=record.step)
    base_name = None if base is None else str(base)
    cuda = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=cuda):
        build = partial(_lora, quantise=quantise, record=record) if layout.kind == "lora" else _full
        model, base_files, words, notes = build(
            layout, base_name, backbone, dtype, device_map, facts
        )
        if dtype == "float64":
            true_float64(model)
            if isinstance(layout.stored, RankWeights):
                restore_doubles(model, layout.stored)
            else:
                _restore_double(model, layout)
    model.eval()
    hashes = _hashes(layout, base_files, fact_files)
    if record is not None and record.path.parent == layout.root:
        record.refuse_changed(hashes)
    if record is not None and record.base is not None and layout.kind == "lora":
        unlike = refuse_other_base(model, record.base, words)
        if unlike is not None:
            notes = (*(note for note in notes if note != SKETCH_NOTE), unlike)
    tokenizer = load_tokenizer(
        [*tokenizer_folders(layout), *([base_files.location] if base_files else [])],
        model,
        revision=None if base_files is None else base_files.revision,
    )
    optimizer, coverage = None, {}
    if layout.optimizer is not None:
        optimizer, coverage = read_optimizer_state(
            layout.optimizer,
            model,
            names_path=layout.param_names,
            stored_weights=layout.stored,
        )
    return Checkpoint(
        model=model,
        tokenizer=tokenizer,
        kind=layout.kind,
        step=layout.step,
        path=layout.root,
        name=name,
        base=words,
        optimizer=optimizer,
        lr=None if optimizer is None else optimizer.lr,
        facts=facts,
        fact_sources=sources,
        coverage={k: v for k, v in coverage.items() if k != "not_verifiable"},
        not_verifiable=(
            *notes,
            *_save_notes(layout),
            *unread_forms(layout, adapter_path=adapter_path, optimizer_path=optimizer_path),
            *coverage.get("not_verifiable", ()),
            *_count_notes(layout, coverage),
        ),
        recorded=_recorded_batch(layout, record),
        optimizer_path=layout.optimizer,
        hashes=hashes,
        weights=tuple(os.path.relpath(file, layout.root) for file in layout.files),
        record=record,
    )


def _count_notes(layout: Layout, coverage: Mapping[str, Any]) -> tuple[str, ...]:
    """verl makes whole numbers of steps of each batch, and its folder counts the batches: another
    count is of another save's optimizer, or steps were skipped."""
    if layout.optimizer is None or not _of_ranks(layout.optimizer):
        return ()
    batches = number_of(layout.root)
    count = int(max(coverage.get("steps", ()), default=0))
    if not batches or (count and count % batches == 0):
        return ()
    return (
        f"optimizer: it counts {count} steps after {batches} batches ({layout.root.name}), and "
        "training makes as many steps of one batch as of another: it may be another save's, or "
        "steps were skipped, and nothing in the files says which",
    )


def _of_ranks(optimizer: Path) -> bool:
    """Whether an optimizer is in files of single ranks, as verl and SkyRL save it."""
    if optimizer.is_dir():
        return any(is_rank_file(file) for file in optimizer.iterdir())
    return is_rank_file(optimizer)


def _lora(
    layout: Layout,
    base: str | None,
    backbone: str | None,
    dtype: str,
    device_map: Any,
    facts: ReadFacts,
    *,
    quantise: bool,
    record: TrainingRecord | None,
) -> tuple[Any, Base | None, str, tuple[str, ...]]:
    config = read_adapter_config(layout)
    check_safetensors(layout.files)
    if carries_base(layout):
        return _lora_with_base(layout, config, dtype, device_map)
    base_files = find_base(
        layout,
        base=base,
        backbone=backbone,
        recorded=config.get("base_model_name_or_path"),
        revision=config.get("revision"),
        local=None if record is None else record.base_folder,
    )
    files = sorted(base_files.folder.glob("*.safetensors")) if base_files.folder else []
    check_safetensors(files)
    quantization, words = _quantization(base_files, facts, device_map, quantise)
    plain, info = load_causal_lm(
        base_files.location,
        dtype=_dtype(dtype, device_map),
        device_map=_device_map(device_map),
        quantization=quantization,
        revision=base_files.revision,
    )
    words += _commit(base_files, plain)
    # A base may carry heads of other tasks; what its language model needs must be there.
    check_loaded(base_files.location, info, extra_allowed=True)
    check_finite_weights(base_files.location, plain, files)
    model = load_adapter(plain, layout, config)
    base_saved = (
        layout.sharded is not None
        and layout.stored is not None
        and take_base(model, layout.sharded, layout.stored)
    )
    if not base_saved:
        refuse_random_base(adapter_config_file(layout), config)
    else:
        words += ", with the weights saved beside the adapter"
    notes = adapter_notes(
        config,
        base_saved=base_saved,
        from_meta=layout.lora_meta is not None,
        base_compared=record is not None and record.base is not None,
        config_recorded=record is not None and record.covers(adapter_config_file(layout)),
    )
    return model, base_files, f"{base_files.words}, {_precision(plain)}{words}", notes


def _lora_with_base(
    layout: Layout, config: AdapterConfig, dtype: str, device_map: Any
) -> tuple[Any, None, str, tuple[str, ...]]:
    """The ranks' files hold the base's weights too (verl, SkyRL), and its config is beside them."""
    assert layout.hf is not None and layout.sharded is not None and layout.stored is not None
    wanted = _dtype(dtype, device_map)
    plain, generation = make_causal_lm(
        layout.hf,
        shapes_of(layout.stored),
        # Nothing says in which precision training held the base; it was saved as it was.
        dtype=torch.float32 if isinstance(wanted, str) else wanted,
    )
    plain.generation_config = generation
    model = load_adapter(plain, layout, config)
    take_base(model, layout.sharded, layout.stored)
    notes = adapter_notes(config, from_meta=layout.lora_meta is not None, base_saved=True)
    placement = _device_map(device_map)
    words = f"the weights saved beside the adapter, {_precision(plain)}"
    return place_on_devices(model, placement), None, words, notes


def _full(
    layout: Layout,
    base: str | None,
    backbone: str | None,
    dtype: str,
    device_map: Any,
    facts: ReadFacts,
) -> tuple[Any, Base | None, str, tuple[str, ...]]:
    check_index(layout, check_safetensors(layout.files))
    for file in layout.files if layout.sharded is None else ():
        if file.suffix == ".bin":
            load_safely(file)
    base_files, config, generation = None, None, None
    own = (layout.config / MODEL_CONFIG).is_file()
    if not own or base is not None or backbone is not None:
        # Accelerate saves weights alone.
        base_files = find_base(layout, base=base, backbone=backbone, recorded=None)
    location = base_files.location if base_files is not None and not own else str(layout.config)
    if not own or layout.sharded is not None:
        shapes = None if layout.stored is None else shapes_of(layout.stored)
        config = model_config(location, shapes=shapes)
        generation = generation_config((layout.weights, layout.root, location), config)
    wanted = _dtype(dtype, device_map)
    # All of a full fine-tune is trained, and what is trained is fp32 unless asked otherwise.
    kind = torch.float32 if isinstance(wanted, str) else wanted
    placement = _device_map(device_map)
    if layout.sharded is not None:
        model = load_sharded_causal_lm(
            layout.sharded,
            where=Path(location) / MODEL_CONFIG,
            stored=layout.stored,
            dtype=kind,
            device_map=placement,
            config=config,
            generation=generation,
        )
    else:
        model, info = load_causal_lm(
            layout.weights,
            dtype=kind,
            device_map=placement,
            config=config,
            generation=generation,
        )
        check_loaded(_weights_name(layout), info, extra_allowed=False)
        check_finite_weights(_weights_name(layout), model, layout.files)
    model.requires_grad_(True)
    words = f"none: a full fine-tune, {_precision(model)}"
    if base_files is not None and not own:
        words = (
            f"none: a full fine-tune, with the config of {base_files.words}, {_precision(model)}"
        )
    return model, base_files, words, ()


def _recorded_batch(layout: Layout, record: TrainingRecord | None) -> Path | None:
    """The batch beside the checkpoint; without one, the record's of the step made from here.

    That is not bound to the weights, and must have a fingerprint to be checked by.
    """
    beside = record is not None and record.path.parent == layout.root
    if layout.recorded is not None or not beside or layout.step is None:
        return layout.recorded
    assert record is not None  # beside
    place = record.step_folder(layout.step)
    whole = place is not None and (place / MADE_STEP).is_dir() and (place / UPDATE_BATCH).is_dir()
    return place / UPDATE_BATCH if place is not None and whole else None


def _commit(base: Base, model: Any) -> str:
    """Which commit of a hub's repository was loaded: a name alone may mean another one tomorrow."""
    commit = getattr(model.config, "_commit_hash", None)
    return "" if base.folder is not None or not commit else f", commit {commit[:12]}"


def _weights_name(layout: Layout) -> Path:
    return layout.files[0] if len(layout.files) == 1 else layout.weights


def _check_device(device_map: Any) -> None:
    """Refuse a device that this machine does not have, before anything is read."""
    if device_map in (None, "auto", "balanced", "balanced_low_0", "sequential"):
        return
    named = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    for one in named:
        try:
            device = torch.device(one)
            if device.type == "meta":
                raise RuntimeError("numbers on the meta device have no values")
            torch.empty(0, device=device)
        except (RuntimeError, TypeError, AssertionError, NotImplementedError, ValueError) as error:
            raise ValueError(
                f"checkpoint.device has {one!r}, which cannot be used on this machine "
                f"({short(error, 120)}). Expected auto, cpu, or one of its "
                f"{torch.cuda.device_count()} CUDA devices, such as cuda:0."
            ) from error


def _on_cuda(device_map: Any) -> bool:
    return torch.cuda.is_available() and device_map != "cpu"


def _dtype(dtype: str, device_map: Any) -> torch.dtype | str:
    if dtype == "auto":
        return "auto" if _on_cuda(device_map) else torch.float32
    # fp64 is made of fp32 after loading, by true_float64.
    return torch.float32 if dtype == "float64" else DTYPES[dtype]


def _restore_double(model: Any, layout: Layout) -> None:
    """Weights that are stored in fp64 passed through fp32 on their way: all their digits again."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for file in layout.files if layout.kind == "full" else ():
        if file.suffix != ".safetensors":
            continue
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118  (it is no mapping)
                if name in named and stored.get_slice(name).get_dtype() == "F64":
                    with torch.no_grad():
                        named[name].copy_(stored.get_tensor(name))


def _device_map(device_map: Any) -> Any:
    if device_map in ("cpu", None) or (device_map == "auto" and not torch.cuda.is_available()):
        return None
    if device_map == "auto" and torch.cuda.device_count() == 1:
        return {"": "cuda:0"}
    return device_map


def _quantization(base: Base, facts: ReadFacts, device_map: Any, quantise: bool) -> tuple[Any, str]:
    """Settings for a 4- or 8-bit base where training had one and this machine can; and words."""
    config = model_config(base.location, revision=base.revision, words=base.words)
    stored = getattr(config, "quantization_config", None)
    if stored is not None and not quantise:
        raise ValueError(
            f"The base {base.location} is stored quantised; expected floating point, which can be "
            "cut over ranks. Set checkpoint.base to the unquantised model (the result then says "
            "that the base is not the one training used), or checkpoint.sharding: none."
        )
    able = (
        quantise and _on_cuda(device_map) and importlib.util.find_spec("bitsandbytes") is not None
    )
    if stored is not None and not able:
        raise ValueError(
            f"The base {base.location} is stored quantised, which needs a GPU and bitsandbytes; "
            "this machine offers neither or one of them. Set checkpoint.base to the unquantised "
            "model: the result then says that the base is not the one training used."
        )
    bits = 4 if facts.get("load_in_4bit") else 8 if facts.get("load_in_8bit") else None
    if stored is not None or bits is None:
        return None, ", quantised as stored" if stored is not None else ""
    if not able:
        return None, f" and unquantised, though training used it in {bits} bit"
    from transformers import BitsAndBytesConfig

    settings = (
        # TRL's defaults; the files do not say more.
        BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        if bits == 4
        else BitsAndBytesConfig(load_in_8bit=True)
    )
    return settings, f", quantised to {bits} bit"


def _precision(model: Any) -> str:
    kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
    return "/".join(sorted(kinds))


def _save_notes(layout: Layout) -> tuple[str, ...]:
    folders = dict.fromkeys((layout.sharded, layout.optimizer))
    return tuple(
        note
        for folder in folders
        if folder is not None and folder.is_dir()
        for note in newer_shards(folder)
    )


def _hashes(layout: Layout, base: Base | None, fact_files: list[Path]) -> dict[str, str]:
    own, of_base = deciding_files(layout, base)
    files = [
        *own,
        *of_base,
        *fact_files,
        layout.weights / TRAINER_STATE,
        layout.root / TRAINER_STATE,
    ]
    for path in (layout.optimizer, layout.param_names):
        files += [] if path is None else files_of(path)
    return {
        os.path.relpath(file, layout.root): sha256(file)
        for file in dict.fromkeys(files)
        if file.is_file()
    }


def load_sharded(
    load: Callable[[], Checkpoint], ranks: Ranks, device: str
) -> tuple[Checkpoint, ShardedModel]:
    """A checkpoint whose model and optimizer are cut over the ranks.

    Each rank in its turn reads the whole of it into host memory and keeps its shards: of all ranks
    on a machine one holds a whole model for a moment, and a device holds its shards and one layer.
    """
    if ranks.group is None:
        raise in_one_process()
    check_torch()
    mesh = mesh_of(ranks, device)

    def read() -> tuple[Checkpoint, ShardedModel]:
        checkpoint = load()
        sharded = ShardedModel(checkpoint.model, ranks, mesh=mesh)
        optimizer = checkpoint.optimizer and sharded.cut_state(checkpoint.optimizer)
        return replace(checkpoint, optimizer=optimizer), sharded

    return ranks.in_turn(read)
