"""Which files make up a checkpoint of verl or SkyRL, and which of them are missing.

    global_step_N/actor/                          verl; SkyRL: policy/; verl's SFT: global_step_N/
      model_world_size_W_rank_R.pt                each rank's part of the model,
      optim_world_size_W_rank_R.pt                of the optimizer,
      extra_state_world_size_W_rank_R.pt          its schedule and random state: counted, never read
      fsdp_config.json                            {"FSDP_version": 2, "world_size": W}, or
                                                  {"fsdp_strategy": "fsdp2", "world_size": W}
      huggingface/                                config.json, tokenizer
      lora_train_meta.json                        {"r", "lora_alpha", "task_type"}: of verl 0.9
      lora_adapter/adapter_config.json            of earlier verl, and of SkyRL

Nothing marks the last file, so a folder is whole when every rank has every part. FSDP1 (verl's
strategy `fsdp`) is refused: its optimizer's files are flat pieces of many parameters that do not
say where they belong, and without a device mesh its model files are pickles of ShardedTensors,
which only unsafe loading builds.
"""

from __future__ import annotations

import re
from pathlib import Path

from entropy_experiments.input_errors import read_json_value

RANK_FILE = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"
POLICIES = ("actor", "policy")
CRITIC = "critic"
HF, LORA = "huggingface", "lora_adapter"
FSDP_CONFIG, LORA_META = "fsdp_config.json", "lora_train_meta.json"


def is_rank_file(path: Path) -> bool:
    return RANK_FILE.fullmatch(path.name) is not None


def first_rank_file(folder: Path, part: str) -> Path | None:
    """The lowest rank's file of a part, or None: the folder has none."""
    if not folder.is_dir():
        return None
    files = [(_match(f), f) for f in folder.iterdir() if is_rank_file(f)]
    ranks = [(int(match[3]), f.name, f) for match, f in files if match[1] == part]
    return min(ranks)[2] if ranks else None


def rank_files(path: Path) -> tuple[Path, ...]:
    """The files of every rank, by rank; `path`: one of them. A missing one is refused."""
    folder, part = path.parent, _match(path)[1]
    files = {
        (int(match[2]), int(match[3])): file
        for file in folder.iterdir()
        if (match := RANK_FILE.fullmatch(file.name)) and match[1] == part
    }
    sizes = sorted({size for size, _ in files})
    if len(sizes) > 1:
        raise ValueError(
            f"{folder} holds {part} files of world sizes {', '.join(map(str, sizes))}; expected "
            "those of one save. It was saved into twice, with another number of ranks: move the "
            "files that you do not mean elsewhere."
        )
    size = sizes[0]
    missing = [rank for rank in range(size) if (size, rank) not in files]
    extra = sorted(rank for _, rank in files if rank >= size)
    if missing or extra:
        got = f"lacks ranks {missing[:8]}" if missing else f"has ranks {extra[:8]}"
        raise FileNotFoundError(
            f"{folder} {got} of {part}_world_size_{size}_rank_*.pt; expected ranks 0 to "
            f"{size - 1}. Saving was interrupted (use an earlier checkpoint), or the ranks of "
            "other machines wrote to their own disks (put all files into one folder)."
        )
    return tuple(files[size, rank] for rank in range(size))


def find_rank_folder(named: Path) -> Path | None:
    """The folder with the policy's rank files: the one named, or one inside; checked."""
    candidates = (named, *(named / name for name in POLICIES))
    folder = next((f for f in candidates if first_rank_file(f, MODEL)), None)
    critic = named if named.name == CRITIC else named / CRITIC
    if folder == critic or (folder is None and first_rank_file(critic, MODEL)):
        raise ValueError(
            f"{critic} holds a critic: a value model has no policy, and so no entropy. Expected "
            f"the policy's folder: {POLICIES[0]}/ of verl, {POLICIES[1]}/ of SkyRL."
        )
    if folder is not None:
        _check_folder(folder)
        return folder
    alone = next((f for c in candidates if (f := first_rank_file(c, OPTIMIZER))), None)
    if alone is not None:
        raise FileNotFoundError(
            f"{alone.parent} holds the optimizer's files and no model_world_size_*_rank_*.pt. "
            "Expected both: add 'model' to the trainer's checkpoint.save_contents, or copy the "
            "missing files."
        )
    return None


def refusal_of_fsdp1(folder: Path, why: str) -> ValueError:
    return ValueError(
        f"{folder} was saved under FSDP1 ({why}): its optimizer's state is flat pieces of many "
        "parameters, which do not say where they belong, and ShardedTensors cannot be loaded "
        "without running code. Nothing was executed. For the real step, train with "
        "actor.strategy=fsdp2 (actor_rollout_ref.actor.strategy in verl), whose checkpoints are "
        "read. Of this checkpoint the weights alone can be had: python -m verl.model_merger merge "
        f"--backend fsdp --local_dir {folder} --target_dir {folder}/merged. That loses the "
        "optimizer, so only a hypothetical step without momentum can be analysed."
    )


def _check_folder(folder: Path) -> None:
    """Every part is there for every rank, and of one world size."""
    sizes: dict[str, int] = {}
    for part in (MODEL, OPTIMIZER, EXTRA):
        first = first_rank_file(folder, part)
        if first is not None:
            sizes[part] = len(rank_files(first))
    if len(set(sizes.values())) > 1:
        words = ", ".join(f"{part} of {size}" for part, size in sizes.items())
        raise ValueError(
            f"{folder} holds files of different world sizes ({words} ranks); expected those of "
            "one save. It was saved into twice: move the files that you do not mean elsewhere."
        )
    path = folder / FSDP_CONFIG
    if not path.is_file():
        return  # verl wrote none before 0.4
    content = read_json_value(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; expected a JSON object.")
    size = content.get("world_size")
    if size is not None and size != sizes[MODEL]:
        raise ValueError(
            f"{path} says world_size {size!r}, and {folder} holds files of {sizes[MODEL]} ranks; "
            "expected the same. Files of two saves were mixed: copy the checkpoint again."
        )
    if content.get("FSDP_version") == 1 or content.get("fsdp_strategy") == "fsdp":
        raise refusal_of_fsdp1(folder, f"{FSDP_CONFIG} says so")


def _match(path: Path) -> re.Match[str]:
    match = RANK_FILE.fullmatch(path.name)
    assert match is not None
    return match
