"""verl's rollout dumps: `rollout_data_dir/N.jsonl`, text only (SkyRL writes the same).

Written by verl's trainers (ray_trainer.py, v1/trainer_base.py; read at commit b178a3c and in verl
0.9.0): {input, output, gts, score, step} and, from 0.9's v1 trainer, `uid`, the key
`{sample}_{rollout}_{output}` of which {sample} is the group; the last output of a rollout has its
reward, and its advantage is that of all. Both texts are decoded with
skip_special_tokens, so a chat prompt has lost its role marks and a response its EOS.

Text is tokenised again, and the way back is checked: the ids of a rollout, decoded as verl decodes,
must be the two texts of the dump. A prompt that fits the tokenizer's chat template in one way, with
a user and perhaps a system message, is rendered through it first, which puts the role marks back;
any other is read as it stands. Both are counted, and so is what does not come back.

verl's advantages are not in the dump. They are computed from `score` within each group, as assumed:
KL in the reward, another estimator or filtered groups would give others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from entropy_experiments.input_errors import check_text, read_jsonl, short
from entropy_experiments.sampling.advantages import Scale
from entropy_experiments.sampling.dumps.rows import (
    Line,
    finite_number,
    one_step,
    order_note,
    required,
)
from entropy_experiments.sampling.text_dumps import Imported, import_records

FORMAT = "verl rollout dump"
NAME = re.compile(r"(\d+)\.jsonl")
KEYS = {"input", "output", "score"}
KEY_OF_OUTPUT = re.compile(r"((.+)_\d+)_(\d+)", re.DOTALL)
"""A uid of the v1 trainer: the rollout (the group, the rollout in it), the output of that."""
PADDING = re.compile(r"pad[0-9a-f]{32}_\d+_\d+")
"""uid of a row by which the v1 trainer fills up a batch; its response mask is empty."""
PENALTY = "overlong_reward"
"""What DAPO's reward manager adds to the score of its reward function, where the run logs it."""
LINE = '{"input": "...", "output": "...", "gts": "...", "score": 1.0, "step": 1, "uid": "..."}'
USED = {
    "input, output": "tokenised again",
    "score": "rewards, and advantages computed from them",
    "uid": "groups, where there is one",
}
MISSING = (
    "token ids",
    "which tokens of the output the policy drew: with tools or several turns it holds their text, "
    "too, and every token of it is read as drawn",
    "whether score is the whole reward (a reward function that returns a dict overwrites it with "
    "its own score, without what a reward manager adds)",
    "how many optimizer steps were made of it (ppo_mini_batch_size, ppo_epochs): it is read as the "
    "batch of one",
    "advantages",
    "log-probs of the engine, of the trainer and of the reference (the checkpoint scores the "
    "tokens again)",
    "the loss's own settings",
    "the temperature",
)
ROLES = ("system", "user")
SENTINELS = ("\u2983system\u2984", "\u2983user\u2984")


def step_files(folder: Path) -> dict[int, Path]:
    """Dumps of a rollout_data_dir by step."""
    named = {NAME.fullmatch(file.name): file for file in folder.iterdir() if file.is_file()}
    return {int(match[1]): file for match, file in named.items() if match is not None}


def read(
    path: Path,
    tokenizer: Any,
    *,
    step: int | None = None,
    max_completion_length: int | None = None,
    append_eos: bool = True,
    scale: Scale = "group",
) -> Imported:
    """The rollouts of one step, tokenised again."""
    lines = [(f"{path}:{number}", line) for number, line in read_jsonl(path, LINE)]
    for where, line in lines:
        _check_line(where, line)
    lines, number = _of_step(path, lines, step)
    _refuse_twice(lines)
    lines, padding = _without_padding(path, lines)
    restored = [_prompt(line["input"], tokenizer) for _, line in lines]
    records = [
        (
            where,
            {
                "prompt_ids": ids,
                "completion": line["output"],
                "reward": float(line["score"]),
                "uid": line.get("uid", line.get("request_id")),
                "group": line.get("uid"),
            },
        )
        for (where, line), (ids, _) in zip(lines, restored, strict=True)
    ]
    grouped = all(line.get("uid") is not None for _, line in lines)
    through = sum(readings == 1 for _, readings in restored)
    unclear = sum(readings > 1 for _, readings in restored)
    twofold = f", of which {unclear} have two readings" if unclear else ""
    notes = [
        f"{FORMAT}: {len(lines)} rollouts, grouped by {'uid' if grouped else 'prompt'}",
        f"{through} of {len(lines)} prompts were rendered through the chat template, "
        f"{len(lines) - through} are read as they stand (verl leaves special tokens out){twofold}",
        *order_note(number),
    ]
    if padding:
        notes.append(f"{padding} rows that only fill up verl's batch are left out")
    imported = import_records(
        records,
        tokenizer,
        max_completion_length,
        append_eos,
        scale,
        notes,
        path,
        group_of=_group if grouped else None,
        session_of=_session if grouped else None,
    )
    unverified = _unverified(imported, lines, tokenizer)
    first = f" (the first: {unverified[0]})" if unverified else ""
    back = len(lines) - len(unverified)
    return replace(
        imported,
        mismatched=len(unverified),
        notes=(
            *imported.notes,
            f"round trip: {back} of {len(lines)} rollouts decode back to the dump's prompt and "
            f"response, {len(unverified)} could not be verified{first}",
            *(f"{column}: {use}" for column, use in USED.items()),
            f"not in the dump: {'; '.join(MISSING)}",
        ),
        format=FORMAT,
        used=USED,
        missing=MISSING,
        made_from=None if number is None else number - 1,
    )


def _check_line(where: str, line: Line) -> None:
    required(where, line, sorted(KEYS), "verl")
    for name in ("input", "output"):
        if not isinstance(line[name], str):
            raise ValueError(f"{where}: {name} is {short(repr(line[name]), 60)}; expected text.")
        check_text(line[name], where=where, name=name)
    if line.get(PENALTY):
        raise ValueError(
            f"{where}: {PENALTY} is {short(repr(line[PENALTY]), 40)}, and score may be the reward "
            "function's own, without it: verl's legacy trainer overwrites the one by the other. "
            "Write JSONL with the whole reward: prompt, completion, reward."
        )
    finite_number(where, "score", line["score"])
    uid = line.get("uid")
    if uid is not None and not isinstance(uid, str):
        raise ValueError(f"{where}: uid is {short(repr(uid), 40)}; expected text.")


def _of_step(
    path: Path, lines: Sequence[tuple[str, Line]], step: int | None
) -> tuple[list[tuple[str, Line]], int | None]:
    """The lines of one step, and its number; None: no line says it."""
    steps = [line["step"] for _, line in lines if line.get("step") is not None]
    if step is not None and steps:
        of_step = [(where, line) for where, line in lines if line.get("step") == step]
        if not of_step:
            listed = sorted(set(map(str, steps)))
            raise ValueError(f"{path} has no rollouts of step {step}; it has steps {listed}.")
        return of_step, step
    return list(lines), one_step(path, steps) if steps else None


def _without_padding(
    path: Path, lines: Sequence[tuple[str, Line]]
) -> tuple[list[tuple[str, Line]], int]:
    """The rollouts, and how many rows only fill up a batch that must be divisible."""
    rollouts = [(w, line) for w, line in lines if not PADDING.fullmatch(line.get("uid") or "")]
    if not rollouts:
        raise ValueError(
            f"{path} has {len(lines)} rows that only fill up a batch, and no rollout; expected at "
            "least one."
        )
    return rollouts, len(lines) - len(rollouts)


def _refuse_twice(lines: Sequence[tuple[str, Line]]) -> None:
    """A key of the v1 trainer names one output; plain uids are those of groups."""
    seen: dict[str, str] = {}
    for where, line in lines:
        uid = line.get("uid")
        if uid is None or not KEY_OF_OUTPUT.fullmatch(uid):
            continue
        if uid in seen:
            raise ValueError(
                f"{where}: uid {short(uid, 60)!r} stands twice (also {seen[uid]}); expected one "
                "line per output. Were two files joined?"
            )
        seen[uid] = where


def _group(record: Line) -> str | None:
    uid = record["group"]
    match = KEY_OF_OUTPUT.fullmatch(uid)
    return uid if match is None else match[2]


def _session(record: Line) -> tuple[str, int] | None:
    match = KEY_OF_OUTPUT.fullmatch(record["group"])
    return None if match is None else (match[1], int(match[3]))


def _prompt(text: str, tokenizer: Any) -> tuple[list[int], int]:
    """(token ids, how many readings through the chat template the text has); 1: they are that."""
    readings = set[tuple[int, ...]]()
    for messages in _conversations(text, tokenizer):
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids = tuple(tokenizer(rendered, add_special_tokens=False)["input_ids"])
        if tokenizer.decode(list(ids), skip_special_tokens=True) == text:
            readings.add(ids)
    if len(readings) == 1:
        return list(*readings), 1
    return list(tokenizer(text)["input_ids"]), len(readings)


def _conversations(text: str, tokenizer: Any) -> list[list[dict[str, str]]]:
    """Messages which, rendered and stripped of special tokens, may have given the text."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    system, user = (
        {"role": role, "content": mark} for role, mark in zip(ROLES, SENTINELS, strict=True)
    )
    out = []
    for messages in ([user], [system, user]):
        try:
            rendered = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # a template of somebody's, which may refuse a system message in any way
            continue
        frame = _without_special(rendered, tokenizer)
        first, *between, last = re.split("|".join(map(re.escape, SENTINELS)), frame)
        fits = text.startswith(first) and text.endswith(last)
        if len(between) != len(messages) - 1 or not fits or len(text) < len(first) + len(last):
            continue
        contents = text[len(first) : len(text) - len(last)]
        for parts in _divided(contents, between):
            pairs = zip(messages, parts, strict=True)
            out.append([{**message, "content": part} for message, part in pairs])
    return out


def _divided(text: str, between: Sequence[str]) -> list[list[str]]:
    """Every way to divide it at the mark between two messages; without a mark, as it is."""
    if not between:
        return [[text]]
    (mark,) = between
    places = [at for at in range(len(text)) if text.startswith(mark, at)] if mark else []
    return [[text[:at], text[at + len(mark) :]] for at in places]


def _without_special(text: str, tokenizer: Any) -> str:
    for token in sorted(tokenizer.all_special_tokens, key=len, reverse=True):
        text = text.replace(token, "")
    return text


def _unverified(imported: Imported, lines: Sequence[tuple[str, Line]], tokenizer: Any) -> list[str]:
    """Where the ids, decoded as verl decodes, are not the dump's texts."""
    rollouts = imported.rollouts
    texts: dict[tuple[str, str], list[str]] = {}
    for where, line in lines:
        texts.setdefault((line["input"], line["output"]), []).append(where)
    for tokens_S, attention_S, response_S in zip(
        rollouts.tokens_NS, rollouts.attention_NS, rollouts.response_NS, strict=True
    ):
        prompt, response = (
            tokenizer.decode(tokens_S[part_S].tolist(), skip_special_tokens=True)
            for part_S in (attention_S & ~response_S, response_S)
        )
        if texts.get((prompt, response)):
            texts[prompt, response].pop()
    return sorted(where for left in texts.values() for where in left)
