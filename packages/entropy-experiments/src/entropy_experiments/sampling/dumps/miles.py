"""miles' per-token columns: `dashboard_columns/rollout_N.parquet` of a run with --dump-details.

Written by miles.ray.rollout.debug_data.save_dashboard_columns (read at commit 31f1ca9), a row per
sample: {sample_index, response_length, total_length, tokens, loss_mask, rollout_log_probs}. The
last two are about the response, the last `response_length` tokens, and may be null.

Neither rewards nor advantages are among the columns. Where the run kept conversations, the file
`trajectory/N.jsonl` beside it has each sample's reward and group: then advantages are computed from
them, as assumed. miles' own advantages are in train_data/N_R.pt, a pickle, which is not opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from entropy_experiments.input_errors import read_jsonl, short
from entropy_experiments.sampling.advantages import Scale, advantages_by_prompt
from entropy_experiments.sampling.dumps.rows import (
    DumpFacts,
    DumpRow,
    Line,
    assemble,
    entries,
    finite_number,
    logprobs,
    mask,
    token_ids,
)
from entropy_experiments.sampling.text_dumps import Imported, read_parquet

FORMAT = "miles dashboard columns"
FOLDER = "dashboard_columns"
NAME = re.compile(r"rollout_((?:eval_)?(\d+))\.parquet")
COLUMNS = {
    "sample_index": "whole numbers",
    "response_length": "whole numbers",
    "total_length": "whole numbers",
    "tokens": "lists of whole numbers",
    "loss_mask": "lists of whole numbers",
    "rollout_log_probs": "lists of numbers",
}
KEYS = set(COLUMNS)
TRAJECTORY = '{"sample_index": 0, "group_index": 0, "status": "completed", "reward": 1.0, ...}'
USED = {
    "loss_mask": "tokens of the response",
    "rollout_log_probs": "of the engine that drew the tokens: behaviour, never scores; the "
    "denominators of the ratio are scored again",
}
MISSING = (
    "advantages (miles keeps them in train_data/N_R.pt, a pickle)",
    "which samples were left out of the loss (remove_sample: their masks were written before they "
    "were zeroed, so they count here)",
    "how many optimizer steps were made of it (num_steps_per_rollout): it is read as the batch of "
    "one",
    "log-probs of the trainer and of the reference",
    "the loss's own settings",
    "the temperature",
)


def step_files(folder: Path) -> dict[int, Path]:
    """Dumps of training rollouts by rollout id; those of evaluations are named by their file."""
    inside = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    named = {NAME.fullmatch(file.name): file for file in inside.iterdir() if file.is_file()}
    found = {match: file for match, file in named.items() if match is not None}
    return {int(m[2]): file for m, file in found.items() if not m[1].startswith("eval_")}


def beside(path: Path) -> Path | None:
    """The conversations of the same samples, if the run kept them."""
    named = NAME.fullmatch(path.name)
    if named is None or path.parent.name != FOLDER:
        return None
    file = path.parent.parent / "trajectory" / f"{named[1]}.jsonl"
    return file if file.is_file() else None


def read(
    path: Path,
    tokenizer: Any,
    *,
    step: int | None = None,
    scale: Scale = "group",
    vocabulary: int | None = None,
) -> Imported:
    """The samples of one rollout step."""
    named = NAME.fullmatch(path.name)
    if step is not None and named is not None and int(named[2]) != step:
        raise ValueError(f"{path} is of rollout {named[2]}; step {step} was asked for.")
    lines = read_parquet(path, check=lambda schema: _check_types(path, schema))
    _refuse_twice(path, [line["sample_index"] for line in lines])
    rows = [_row(f"{path}: row {at}", line) for at, line in enumerate(lines)]
    notes = [f"{FORMAT}{f' of rollout {named[1]}' if named else ''}: {len(rows)} rollouts"]
    used, missing = dict(USED), MISSING
    unmasked = sum(line["loss_mask"] is None for line in lines)
    if unmasked:
        notes.append(
            f"{unmasked} of {len(rows)} rollouts have no loss_mask: every token of the response "
            "counts, as in miles"
        )
    unscored = sum(row.behaviour_logprob is None for row in rows)
    if unscored:
        del used["rollout_log_probs"]
        missing = (f"rollout_log_probs of {unscored} of {len(rows)} rollouts", *missing)
    sidecar = beside(path)
    if sidecar is None:
        missing = ("rewards (no trajectory/N.jsonl beside it)", "truncated responses", *missing)
    else:
        rows, said = _with_rewards(rows, lines, sidecar, scale)
        notes.append(said)
    facts = DumpFacts(format=FORMAT, used=used, missing=missing, notes=tuple(notes))
    return assemble(rows, facts, tokenizer=tokenizer, vocabulary=vocabulary)


def _check_types(path: Path, schema: Any) -> None:
    """Parquet keeps a type with each column: a file of another program is known by it."""
    import pyarrow.types as kinds

    missing = sorted(KEYS - set(schema.names))
    if missing:
        raise ValueError(
            f"{path} lacks the columns {missing}; expected those of {FORMAT}. Got {schema.names}."
        )

    def is_list(kind: Any) -> bool:
        return kinds.is_list(kind) or kinds.is_large_list(kind)

    fits = {
        "whole numbers": kinds.is_integer,
        "lists of whole numbers": lambda kind: is_list(kind) and kinds.is_integer(kind.value_type),
        "lists of numbers": lambda kind: is_list(kind) and kinds.is_floating(kind.value_type),
    }
    for name, what in COLUMNS.items():
        kind = schema.field(name).type
        if not fits[what](kind):
            raise ValueError(f"{path}: column {name} has type {kind}; expected {what}.")


def _refuse_twice(path: Path, indices: Sequence[Any]) -> None:
    seen: set[Any] = set()
    for index in indices:
        if index is not None and index in seen:
            raise ValueError(
                f"{path}: sample_index {index} stands twice; expected one row per sample. Either "
                "two files were joined, or these are compact rollouts, whose parts share one "
                "index: how miles weighs those is not in the dump, and they are not read."
            )
        seen.add(index)


def _row(where: str, line: Line) -> DumpRow:
    tokens = token_ids(where, "tokens", line["tokens"])
    total, length = line["total_length"], line["response_length"]
    if total != len(tokens):
        raise ValueError(
            f"{where}: tokens has {len(tokens)} entries, total_length is {total}; expected the "
            "same."
        )
    if length is None or not 0 <= length <= total:
        raise ValueError(
            f"{where}: response_length is {length}; expected 0 to {total}, the tokens of the row."
        )
    before = total - length
    ones = [1] * length
    drawn = mask(
        where, "loss_mask", ones if line["loss_mask"] is None else line["loss_mask"], length
    )
    response = [False] * before + drawn
    behaviour = line["rollout_log_probs"]
    if behaviour is not None:
        values = entries(where, "rollout_log_probs", behaviour, length)
        behaviour = logprobs(where, "rollout_log_probs", [0.0] * before + values, response)
    index = line["sample_index"]
    return DumpRow(
        where=where,
        tokens=tokens,
        response=response,
        behaviour_logprob=behaviour,
        uid=None if index is None else str(index),
    )


def _prompt(line: Line) -> list[int]:
    return line["tokens"][: line["total_length"] - line["response_length"]]


def _with_rewards(
    rows: Sequence[DumpRow], lines: Sequence[Line], sidecar: Path, scale: Scale
) -> tuple[list[DumpRow], str]:
    """Rewards and groups of trajectory/N.jsonl, and advantages computed from them."""
    about: dict[int, Mapping[str, Any]] = {}
    for number, entry in read_jsonl(sidecar, TRAJECTORY):
        index = entry.get("sample_index")
        if type(index) is not int or index in about:
            raise ValueError(
                f"{sidecar}:{number}: sample_index is {short(repr(index), 40)}; expected a whole "
                "number that no other line has."
            )
        about[index] = entry
    described = [about.get(line["sample_index"]) for line in lines]
    for entry in described:
        group = None if entry is None else entry.get("group_index")
        if type(group) not in (int, type(None)):
            raise ValueError(
                f"{sidecar}: group_index is {short(repr(group), 40)}; expected a whole number."
            )
    known = [
        (finite_number(str(sidecar), "reward", entry["reward"]), entry.get("group_index"))
        for entry in described
        if entry is not None and entry.get("reward") is not None
    ]
    if len(known) < len(rows):
        return list(rows), (
            f"{sidecar} has the rewards of {len(known)} of {len(rows)} rollouts: no advantages are "
            "computed from them"
        )
    prompts: dict[Any, int] = {}
    keys = [
        group if group is not None else tuple(_prompt(line))
        for line, (_, group) in zip(lines, known, strict=True)
    ]
    group_N = torch.tensor([prompts.setdefault(key, len(prompts)) for key in keys])
    reward_N = torch.tensor([reward for reward, _ in known], dtype=torch.float64)
    advantage_N = advantages_by_prompt(scale)(reward_N, group_N).tolist()
    out = [
        replace(
            row,
            reward=reward,
            advantage=[advantage] * len(row.tokens),
            truncated=entry is not None and entry.get("status") == "truncated",
        )
        for row, (reward, _), advantage, entry in zip(
            rows, known, advantage_N, described, strict=True
        )
    ]
    return out, (
        f"rewards and groups from {sidecar.name} beside it; advantages were computed from them "
        f"(assumed: group-relative, scale {scale!r}; {len(prompts)} groups)"
    )
