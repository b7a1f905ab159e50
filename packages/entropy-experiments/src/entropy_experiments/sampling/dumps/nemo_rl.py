"""NeMo-RL's training data: `train_data_stepN.jsonl` in its log directory.

Written by nemo_rl.utils.logger.log_batched_dict_as_jsonl from grpo.py, grpo_sync.py and ppo.py
(read at commit 7ea279a): a line per rollout of the whole batch, `idx` 0, 1, 2, ... Each value is a
batch of one, hence in a list of its own: `"rewards": [1.0]`, `"token_ids": [[...]]`. Rows are
padded on the right to one width; `input_lengths` says where the padding begins. Entry s of every
list is about token s: the loss reads `token_mask[:, 1:]` beside `prev_logprobs[:, 1:]`.

`prev_logprobs` are the trainer's scores before the step, the denominator of its ratio. With
`force_on_policy_ratio` it does not compute them and writes zeros throughout: these are not read. A
rollout with sample_loss_mask 0 was drawn and is not in the loss.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from entropy_experiments.input_errors import read_jsonl, short
from entropy_experiments.sampling.dumps.rows import (
    DumpFacts,
    DumpRow,
    Line,
    assemble,
    count_from_zero,
    finite_number,
    logprobs,
    mask,
    numbers,
    required,
    token_ids,
)
from entropy_experiments.sampling.text_dumps import Imported

FORMAT = "NeMo-RL training data"
NAME = re.compile(r"train_data_step(\d+)\.jsonl")
KEYS = {"token_ids", "token_loss_mask", "sample_loss_mask"}
NEEDED = ("token_ids", "token_loss_mask", "sample_loss_mask", "advantages", "idx")
LINE = '{"token_ids": [[...]], "token_loss_mask": [[...]], "advantages": [[...]], ..., "idx": 0}'
USED = {
    "token_loss_mask, sample_loss_mask": "tokens of the response; rollouts that the loss counts",
    "advantages": "of each token",
    "prev_logprobs": "denominators of the ratio, as in NeMo-RL's loss",
    "generation_logprobs": "of the engine that drew the tokens: behaviour, never scores",
}
MISSING = (
    "reference log-probs",
    "the loss's own settings",
    "the temperature",
    "which responses the length limit cut off",
    "how many optimizer steps were made of it (policy.train_global_batch_size): it is read as the "
    "batch of one",
    "names of the rollouts (uid is idx, the row in the step's batch)",
)


def step_files(folder: Path) -> dict[int, Path]:
    """Dumps in a log directory by step."""
    named = {NAME.fullmatch(file.name): file for file in folder.iterdir() if file.is_file()}
    return {int(match[1]): file for match, file in named.items() if match is not None}


def read(
    path: Path, tokenizer: Any, *, step: int | None = None, vocabulary: int | None = None
) -> Imported:
    """The batch of one optimizer step."""
    named = NAME.fullmatch(path.name)
    if step is not None and named is not None and int(named[1]) != step:
        raise ValueError(f"{path} is of step {named[1]}; step {step} was asked for.")
    lines = [(f"{path}:{number}", line) for number, line in read_jsonl(path, LINE)]
    for where, line in lines:
        required(where, line, NEEDED, "NeMo-RL")
    indices = [line["idx"] for _, line in lines]
    count_from_zero(str(path), "idx", indices, "Copy the file again.")
    lines = [(where, {key: _of_one(value) for key, value in line.items()}) for where, line in lines]
    rows = [_row(where, line) for where, line in lines]
    scored = any(any(row.old_logprob or ()) for row in rows)
    lacking = [row.where for row in rows if row.old_logprob is None]
    if scored and lacking:
        raise ValueError(
            f"{lacking[0]}: lacks prev_logprobs, which other lines have; expected them in all "
            "lines or in none. Copy the file again."
        )
    notes = [f"{FORMAT}{f' of step {named[1]}' if named else ''}: {len(rows)} rollouts"]
    missing, used = MISSING, dict(USED)
    if not scored:
        rows = [replace(row, old_logprob=None) for row in rows]
        used["prev_logprobs"] = (
            "0 throughout or absent, as with force_on_policy_ratio: not used, the checkpoint's own "
            "scores are the denominators"
        )
    if any(row.behaviour_logprob is None for row in rows):
        del used["generation_logprobs"]
        missing = ("generation_logprobs", *missing)
    if any(row.reward is None for row in rows):
        missing = ("rewards", *missing)
    outside = sum(row.counted is not None and not any(row.counted) for row in rows)
    if outside:
        notes.append(f"{outside} of {len(rows)} rollouts are not in the loss (sample_loss_mask)")
    facts = DumpFacts(
        format=FORMAT,
        used=used,
        missing=missing,
        notes=tuple(notes),
        step=None if named is None else int(named[1]),
    )
    return assemble(rows, facts, tokenizer=tokenizer, vocabulary=vocabulary)


def _of_one(value: Any) -> Any:
    """A batch of one without its batch dimension."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _row(where: str, line: Line) -> DumpRow:
    tokens = token_ids(where, "token_ids", line["token_ids"])
    width = len(tokens)
    drawn = mask(where, "token_loss_mask", line["token_loss_mask"], width)
    length = _length(where, line.get("input_lengths"), drawn)
    advantages = line["advantages"]
    if not isinstance(advantages, list):  # one for the whole rollout
        advantages = [advantages] * width
    elif len(advantages) == 1 < width:
        advantages = advantages * width

    def scores(name: str) -> list[float] | None:
        if line.get(name) is None:
            return None
        return logprobs(where, name, line[name], drawn)[:length]

    (inside,) = mask(where, "sample_loss_mask", [line["sample_loss_mask"]], 1)
    reward = line.get("filtered_rewards", line.get("rewards"))
    return DumpRow(
        where=where,
        tokens=tokens[:length],
        response=drawn[:length],
        counted=None if inside else [False] * length,
        advantage=numbers(where, "advantages", advantages, drawn)[:length],
        old_logprob=scores("prev_logprobs"),
        behaviour_logprob=scores("generation_logprobs"),
        reward=None if reward is None else finite_number(where, "rewards", reward),
        uid=str(line["idx"]),
    )


def _length(where: str, value: Any, drawn: list[bool]) -> int:
    """Tokens before the padding; without a stated length, up to the last one in the loss."""
    last = max((at + 1 for at, mine in enumerate(drawn) if mine), default=1)
    if value is None:
        return last
    if type(value) is not int or not 1 <= value <= len(drawn):
        raise ValueError(
            f"{where}: input_lengths is {short(repr(value), 40)}; expected 1 to {len(drawn)}, the "
            "tokens before the padding."
        )
    if last > value:
        raise ValueError(
            f"{where}: token_loss_mask counts token {last - 1}, which is padding (input_lengths is "
            f"{value}); expected tokens of the rollout alone."
        )
    return value
