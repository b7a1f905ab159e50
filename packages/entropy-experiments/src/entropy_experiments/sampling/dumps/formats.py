"""Which dump is this? By its contents, with the file's name for folders and for messages.

    prime-rl   token_exports/step_N/rank_R.jsonl + STABLE   prime_rl.py
    NeMo-RL    train_data_stepN.jsonl                       nemo_rl.py
    miles      dashboard_columns/rollout_N.parquet          miles.py
    verl       rollout_data_dir/N.jsonl                     verl.py
    TRL        completions_NNNNN.parquet                    text_dumps.py
    any        JSONL with a prompt and a response per line  text_dumps.py

Pickles are refused by name, unopened: to read one is to run what is in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from entropy_experiments.artifacts import MANIFEST
from entropy_experiments.input_errors import read_jsonl
from entropy_experiments.sampling.advantages import Scale
from entropy_experiments.sampling.dumps import miles, nemo_rl, prime_rl, verl
from entropy_experiments.sampling.text_dumps import (
    LINE,
    PROMPT,
    RESPONSE,
    RESPONSE_IDS,
    Imported,
    from_jsonl,
    from_trl_completions,
    read_parquet_schema,
)

Format = Literal["prime-rl", "nemo-rl", "miles", "verl", "trl", "jsonl"]
KNOWN = (
    "a folder of save_rollouts or save_update_batch",
    "prime-rl's token_exports/step_N (rank_R.jsonl and STABLE)",
    "NeMo-RL's train_data_stepN.jsonl",
    "miles' dashboard_columns/rollout_N.parquet",
    "verl's rollout_data_dir/N.jsonl",
    "TRL's completions_NNNNN.parquet",
    "a .jsonl with a prompt and a response per line",
)
PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".ckpt")
PACKED = (".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".lz4")


def read_dump(
    path: str | Path,
    tokenizer: Any,
    *,
    step: int | None = None,
    ranks: int | None = None,
    max_completion_length: int | None = None,
    append_eos: bool = True,
    scale: Scale = "group",
    vocabulary: int | None = None,
) -> Imported:
    """Rollouts that another framework dumped, as an update batch where it has what one needs.

    The format is recognised; `notes` of the result say what each stored column is used for, what
    was assumed, and what the dump does not hold.

    Args:
        path: File or folder of the dump.
        tokenizer: Of the trained model.
        step: Which step, where the folder or file has several.
        ranks: prime-rl: how many ranks' files there must be.
        max_completion_length: Text dumps: responses of so many tokens were cut off.
        append_eos: Text dumps: put the final EOS back, which decoding removed.
        scale: How advantages are computed where the dump has only rewards.
        vocabulary: Number of token ids of the model; None: the tokenizer's.

    Returns:
        The rollouts, the batch, and notes.

    Raises:
        ValueError: If the format is not known, or the dump is damaged; the message names the line.

    Examples:
        >>> imported = read_dump("token_exports/step_12", tokenizer)  # doctest: +SKIP
        >>> imported.batch.advantage_NS.shape  # doctest: +SKIP
    """
    path, kind = _file(Path(path), step)
    token_options: dict[str, Any] = {"step": step, "vocabulary": vocabulary}
    if ranks is not None and kind != "prime-rl":
        raise ValueError(
            f"ranks is about prime-rl's token exports; {path} is {kind}. Leave it out."
        )
    if kind == "prime-rl":
        return prime_rl.read(path, tokenizer, ranks=ranks, **token_options)
    if kind == "nemo-rl":
        return nemo_rl.read(path, tokenizer, **token_options)
    if kind == "miles":
        return miles.read(path, tokenizer, scale=scale, **token_options)
    text_options: dict[str, Any] = {
        "max_completion_length": max_completion_length,
        "append_eos": append_eos,
        "scale": scale,
    }
    if kind == "verl":
        return verl.read(path, tokenizer, step=step, **text_options)
    if kind == "trl":
        return from_trl_completions(path, tokenizer, **text_options)
    return from_jsonl(path, tokenizer, step=step, **text_options)


def dump_files(path: str | Path, step: int | None = None, ranks: int | None = None) -> list[Path]:
    """Every file that `read_dump` reads: what a result depends on."""
    path, kind = _file(Path(path), step)
    if kind == "prime-rl":
        folder = prime_rl.step_folder(path, step)
        assert folder is not None  # it is how the format was recognised
        return [*prime_rl.files(folder, ranks).values()]
    sidecar = miles.beside(path) if kind == "miles" else None
    return [path] if sidecar is None else [path, sidecar]


def _file(path: Path, step: int | None) -> tuple[Path, Format]:
    """The file, or prime-rl's folder, that holds the step; and its format."""
    if path.is_dir():
        return _in_folder(path, step)
    _refuse_by_name(path)
    if not path.is_file():
        raise FileNotFoundError(f"No such file: {path}. Expected {_known()}.")
    if path.suffix == ".parquet":
        names = set(read_parquet_schema(path).names)
        by_name = miles.NAME.fullmatch(path.name) is not None
        if names >= miles.KEYS or (by_name and {"tokens", "sample_index"} & names):
            return path, "miles"
        if {PROMPT[0], RESPONSE[0]} & names:
            return path, "trl"
        raise ValueError(_unknown(path, f"its columns are {sorted(names)}"))
    if path.suffix not in (".jsonl", ".json"):
        raise ValueError(_unknown(path))
    keys = set(next(iter(read_jsonl(path, LINE)))[1])
    if keys >= prime_rl.KEYS or prime_rl.is_rank_file(path):
        return path, "prime-rl"
    if keys >= nemo_rl.KEYS or nemo_rl.NAME.fullmatch(path.name):
        return path, "nemo-rl"
    if keys >= verl.KEYS:
        return path, "verl"
    if keys & {*PROMPT, *RESPONSE, *RESPONSE_IDS, "prompt_ids"}:
        return path, "jsonl"
    raise ValueError(_unknown(path, f"its first line has the keys {sorted(keys)[:12]}"))


def _in_folder(path: Path, step: int | None) -> tuple[Path, Format]:
    if prime_rl.step_folder(path, step) is not None:
        return path, "prime-rl"
    for steps in (nemo_rl.step_files(path), miles.step_files(path), verl.step_files(path)):
        if not steps:
            continue
        if step is None and len(steps) == 1:
            (step,) = steps
        if step not in steps:
            listed = ", ".join(map(str, sorted(steps)[:8])) + (", ..." if len(steps) > 8 else "")
            asked = "one is needed" if step is None else f"step {step} is not there"
            raise ValueError(
                f"{path} holds dumps of the steps {listed}; {asked}: set step, or give the file "
                "itself."
            )
        return _file(steps[step], step)
    for file in sorted(path.iterdir()):
        _refuse_by_name(file)
    if (path / MANIFEST).exists():
        raise ValueError(
            f"{path} has a {MANIFEST}: it is a folder of this program. Read it with load_rollouts "
            "or load_update_batch."
        )
    raise ValueError(_unknown(path))


def _refuse_by_name(path: Path) -> None:
    if path.suffix in PICKLES:
        raise ValueError(
            f"{path} is a pickle, as slime and miles write their samples (rollout_data/N.pt, "
            "train_data/N_R.pt); opening one runs what is in it, so it is not opened. Of miles "
            "give dashboard_columns/rollout_N.parquet. Of slime write JSONL where slime is "
            "installed, a line per sample: prompt_ids = tokens[:-response_length], "
            "completion_ids = tokens[-response_length:], reward, logprobs = rollout_log_probs."
        )
    if path.suffix == ".bin":
        raise ValueError(
            f"{path} is a message between prime-rl's processes (rollouts/step_N/rank_R.bin) or a "
            "pickle; neither is opened. Set trainer.enable_token_export = true, and give "
            "token_exports/step_N."
        )
    if path.suffix in PACKED:
        raise ValueError(f"{path} is compressed. Unpack it, and give what is inside: {_known()}.")


def _known() -> str:
    return f"{'; '.join(KNOWN[:-1])}; or {KNOWN[-1]}"


def _unknown(path: Path, got: str = "") -> str:
    because = f" ({got})" if got else ""
    return f"cannot tell what {path} is{because}; expected {_known()}."
