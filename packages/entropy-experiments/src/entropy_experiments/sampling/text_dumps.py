"""Dumps that kept text rather than tokens: TRL's completions parquet and JSONL of any trainer.

Text is tokenised again. That is not always what was drawn: trainers decode with special tokens
removed, and a text may have several tokenisations. So every import says how many responses do not
decode back to their own text, and which facts it had to supply (the final EOS, for one).

Columns understood, first found wins:

    prompt      prompt, input, question      (text or chat messages), or prompt_ids
    response    completion, response, output (likewise), or completion_ids, response_ids
    reward      reward, score; in TRL's parquet every other column of numbers
    others      advantage(s), logprobs, step, uid (also request_id, id)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.input_errors import check_text, is_finite_number, read_jsonl, short
from entropy_experiments.sampling.advantages import (
    Scale,
    advantages_by_prompt,
    group_advantages,
    weighted_rewards,
)
from entropy_experiments.types import Rollouts, UpdateBatch

Line = Mapping[str, Any]
"""One rollout as the file has it: values by column."""
PROMPT = ("prompt", "input", "question")
RESPONSE = ("completion", "response", "output")
RESPONSE_IDS = ("completion_ids", "response_ids")
REWARD = ("reward", "score")
ADVANTAGE = ("advantage", "advantages")
LOGPROBS = ("logprobs", "old_logprobs")
UID = ("uid", "request_id", "id")
LINE = '{"prompt": "...", "completion": "...", "reward": 1.0}'


@dataclass(frozen=True, kw_only=True, eq=False)
class Imported:
    """What was in the file. `batch` is None when it had neither advantages nor rewards."""

    rollouts: Rollouts
    batch: UpdateBatch | None
    mismatched: int
    """Responses whose tokens do not decode back to the text of the file."""
    notes: tuple[str, ...]
    format: str = "text"
    used: Mapping[str, str] = field(default_factory=dict)
    """What each stored column is used for, where the reader knows the framework."""
    missing: tuple[str, ...] = ()
    """What the framework's dump does not hold."""
    made_from: int | None = None
    """Number of the checkpoint that training made this step from; None: the dump does not say."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    where: str
    prompt: str
    prompt_ids: list[int]
    response: str | None
    """None when the file has the response's tokens."""
    ids: list[int]
    truncated: bool
    logprobs: list[float] | None
    reward: float | None
    advantage: float | None
    uid: str | None
    group: str | None
    """Rollouts of one group are compared in the advantage; None: those of one prompt are."""
    session: tuple[str, int] | None
    """(rollout, number of the output): its last output alone is compared, and its advantage is
    that of all outputs; None: every row is a rollout of its own."""


def from_trl_completions(
    path: str | Path,
    tokenizer: Any,
    *,
    max_completion_length: int | None = None,
    append_eos: bool = True,
    reward_columns: Sequence[str] | None = None,
    weights: Sequence[float] | None = None,
    scale: Scale = "group",
) -> Imported:
    """One `completions_NNNNN.parquet` of a trainer with `log_completions=True`.

    Responses shorter than `max_completion_length` tokens get the EOS that TRL's decoding removed;
    longer ones are flagged truncated. Without it every response gets an EOS, and a note says so.
    """
    path = Path(path)
    records = read_parquet(path)
    columns = list(records[0])
    for name, options in (("prompt", PROMPT[:1]), ("completion", RESPONSE[:1])):
        if not any(option in columns for option in options):
            raise ValueError(
                f"{path} has no column {name!r}; got {columns}. Expected what TRL writes with "
                "log_completions=True: step, prompt, completion, a column per reward function, "
                "advantage."
            )
    reward_names = _reward_columns(path, records, reward_columns)
    notes = []
    if reward_names:
        values_NF = torch.tensor(
            [[_number(record[name]) for name in reward_names] for record in records],
            dtype=torch.float64,
        )
        total_N = weighted_rewards(values_NF, weights or [1.0] * len(reward_names))
        records = [
            {**record, "reward": None if math.isnan(reward) else reward}
            for record, reward in zip(records, total_N.tolist(), strict=True)
        ]
        notes.append(f"reward = weighted sum of the columns {reward_names}")
    named = [(f"{path}: row {i}", record) for i, record in enumerate(records)]
    return import_records(named, tokenizer, max_completion_length, append_eos, scale, notes, path)


def from_jsonl(
    path: str | Path,
    tokenizer: Any,
    *,
    step: int | None = None,
    max_completion_length: int | None = None,
    append_eos: bool = True,
    scale: Scale = "group",
) -> Imported:
    """A line per rollout; also verl's `rollout_data_dir` dumps {input, output, score, step}."""
    path = Path(path)
    named = [(f"{path}:{number}", record) for number, record in read_jsonl(path, LINE)]
    for where, record in named:
        line_step = record.get("step")
        if line_step is not None and (
            isinstance(line_step, bool) or not isinstance(line_step, int)
        ):
            raise ValueError(
                f"{where}: step is {short(repr(line_step), 60)}; expected a whole number. Correct "
                "the line, or leave the step out."
            )
    steps = sorted({record["step"] for _, record in named if record.get("step") is not None})
    if step is not None:
        named = [(where, record) for where, record in named if record.get("step") == step]
        if not named:
            raise ValueError(f"{path} has no rollouts of step {step}; it has steps {steps}.")
    elif len(steps) > 1:
        raise ValueError(
            f"{path} holds the steps {steps[:6]}{'...' if len(steps) > 6 else ''}; one update is "
            "made of one step: say which as step=..."
        )
    return import_records(named, tokenizer, max_completion_length, append_eos, scale, [], path)


def import_records(
    named: Sequence[tuple[str, Line]],
    tokenizer: Any,
    longest: int | None,
    append_eos: bool,
    scale: Scale,
    notes: list[str],
    path: Path,
    group_of: Callable[[Line], str | None] | None = None,
    session_of: Callable[[Line], tuple[str, int] | None] | None = None,
) -> Imported:
    """Records as rollouts, those of one prompt side by side.

    `group_of`: what rollout a record is compared with in its advantage; left out: its prompt's.
    `session_of`: which rollout has it as one of several outputs; left out: each is one.
    """
    eos = tokenizer.eos_token_id
    if append_eos and eos is None:
        raise ValueError(
            "The tokenizer has no EOS token, so the one that dumps leave out cannot be put back: "
            "pass append_eos=False, or set tokenizer.eos_token."
        )
    rows = [
        _row(where, record, tokenizer, longest, eos if append_eos else None, group_of, session_of)
        for where, record in named
    ]
    # Responses to one prompt side by side, prompts in order of first appearance.
    order: dict[tuple[int, ...], int] = {}
    index = [order.setdefault(tuple(row.prompt_ids), len(order)) for row in rows]
    rows = [rows[i] for i in sorted(range(len(rows)), key=lambda i: index[i])]
    index.sort()
    mismatched = sum(not _round_trips(row, tokenizer) for row in rows)
    retold = sum(row.response is not None for row in rows)
    if retold:
        notes.append(
            f"{retold} responses were tokenised again from text; {mismatched} do not decode back "
            "to it, and a response may have been drawn as other tokens of the same text"
        )
        if append_eos and longest is None:
            notes.append(
                "every response was taken to end with EOS: give max_completion_length to tell "
                "truncated ones"
            )
    stands = "input" in named[0][1] and not {"prompt", "prompt_ids"} & set(named[0][1])
    if stands:
        notes.append("verl's dumps leave special tokens out of the prompt; it is read as it stands")
    rollouts = _pack(rows, index, tokenizer, notes)
    return Imported(
        rollouts=rollouts,
        batch=_batch(rows, index, rollouts, scale, path, notes),
        mismatched=mismatched,
        notes=tuple(notes),
    )


def _row(
    where: str,
    record: Line,
    tokenizer: Any,
    longest: int | None,
    eos: int | None,
    group_of: Callable[[Line], str | None] | None,
    session_of: Callable[[Line], tuple[str, int] | None] | None,
) -> _Row:
    prompt_ids = _ids(where, record, ("prompt_ids",))
    prompt = _first(record, PROMPT)
    if prompt_ids is None:
        if prompt is None:
            raise ValueError(f"{where}: no prompt; expected one of {PROMPT}. Got {sorted(record)}.")
        prompt_ids, prompt = _prompt(where, prompt, tokenizer)
    response, ids = None, _ids(where, record, RESPONSE_IDS)
    truncated = False
    if ids is None:
        text = _first(record, RESPONSE)
        if text is None:
            raise ValueError(
                f"{where}: no response; expected one of {RESPONSE}. Got {sorted(record)}."
            )
        response = _response(where, text)
        ids = list(tokenizer(response, add_special_tokens=False)["input_ids"])
        truncated = longest is not None and len(ids) >= longest
        if eos is not None and not truncated and ids[-1:] != [eos]:
            ids.append(eos)
    if not prompt_ids or not ids:
        empty = "response" if prompt_ids else "prompt"
        raise ValueError(
            f"{where}: the {empty} has no tokens; expected at least one. Drop this rollout"
            + (", or keep append_eos=True." if empty == "response" else ".")
        )
    return _Row(
        where=where,
        prompt=str(prompt),
        prompt_ids=prompt_ids,
        response=response,
        ids=ids,
        truncated=truncated,
        logprobs=_logprobs(where, record),
        reward=_optional(where, record, REWARD),
        advantage=_optional(where, record, ADVANTAGE),
        uid=_uid(where, record),
        group=None if group_of is None else group_of(record),
        session=None if session_of is None else session_of(record),
    )


def _uid(where: str, record: Line) -> str | None:
    uid = _first(record, UID)
    if uid is None:
        return None
    check_text(str(uid), where=where, name="the uid")
    return str(uid)


def _logprobs(where: str, record: Line) -> list[float] | None:
    values = _first(record, LOGPROBS)
    if values is None:
        return None
    listed = list(values) if isinstance(values, (list, tuple)) else [values]
    for at, value in enumerate(listed):
        if not isinstance(value, float) and not is_finite_number(value):  # NaN leaves them all out
            raise ValueError(
                f"{where}: {LOGPROBS[0]}[{at}] is {short(repr(value), 40)}; expected a list of "
                "numbers."
            )
    return [float(value) for value in listed]


def _prompt(where: str, prompt: Any, tokenizer: Any) -> tuple[list[int], str]:
    if isinstance(prompt, str):
        check_text(prompt, where=where, name="the prompt")
        return list(tokenizer(prompt)["input_ids"]), prompt
    messages = _messages(where, prompt)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            f"{where}: the prompt is a list of chat messages, and this tokenizer has no chat "
            "template. Use the tokenizer of the trained model."
        )
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]), text


def _response(where: str, response: Any) -> str:
    if isinstance(response, str):
        check_text(response, where=where, name="the response")
        return response
    messages = _messages(where, response)
    if len(messages) != 1:
        raise ValueError(
            f"{where}: the response has {len(messages)} chat messages; expected one. Which tokens "
            "of a tool dialogue were drawn cannot be known from text: record the update batch."
        )
    return messages[0]["content"]


def _messages(where: str, value: Any) -> list[dict[str, str]]:
    messages: list[Any] = list(value) if isinstance(value, (list, tuple)) else [None]
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            raise ValueError(
                f"{where}: got {type(value).__name__} {str(value)[:60]!r}; expected text or a list "
                "of chat messages {'role', 'content'}."
            )
        check_text(message["content"], where=where, name="a message")
    return [{key: message[key] for key in ("role", "content")} for message in messages]


def _round_trips(row: _Row, tokenizer: Any) -> bool:
    if row.response is None:
        return True
    ids = row.ids
    if ids[-1] == tokenizer.eos_token_id and not row.response.endswith(tokenizer.eos_token):
        ids = ids[:-1]
    return tokenizer.decode(ids, skip_special_tokens=False) == row.response


def _pack(rows: Sequence[_Row], index: list[int], tokenizer: Any, notes: list[str]) -> Rollouts:
    lengths = [(len(row.prompt_ids), len(row.ids)) for row in rows]
    width = max(p + r for p, r in lengths)
    pad = tokenizer.pad_token_id
    tokens_NS = torch.full((len(rows), width), 0 if pad is None else pad)
    attention_NS = torch.zeros(len(rows), width, dtype=torch.bool)
    response_NS = attention_NS.clone()
    for n, (row, (p, r)) in enumerate(zip(rows, lengths, strict=True)):
        tokens_NS[n, : p + r] = torch.tensor(row.prompt_ids + row.ids)
        attention_NS[n, : p + r] = True
        response_NS[n, p : p + r] = True
    return Rollouts(
        tokens_NS=tokens_NS,
        attention_NS=attention_NS,
        response_NS=response_NS,
        prompt_N=torch.tensor(index),
        behaviour_logprob_NS=_behaviour(rows, response_NS, notes),
        truncated_N=torch.tensor([row.truncated for row in rows]),
        text=tuple(
            row.response if row.response is not None else tokenizer.decode(row.ids) for row in rows
        ),
        uid=None if all(row.uid is None for row in rows) else tuple(row.uid for row in rows),
    )


def _behaviour(rows: Sequence[_Row], response_NS: Tensor, notes: list[str]) -> Tensor | None:
    logprobs = [row.logprobs for row in rows if row.logprobs is not None]
    if not logprobs:
        return None
    fitting = [row.logprobs for row in rows if row.logprobs and len(row.logprobs) == len(row.ids)]
    if len(fitting) < len(rows) or not all(math.isfinite(x) for line in fitting for x in line):
        notes.append(
            f"log-probs of the file were left out: {len(rows) - len(fitting)} of {len(rows)} "
            "rollouts have another number of them than of tokens (or some are not finite)"
        )
        return None
    behaviour_NS = torch.zeros(response_NS.shape, dtype=torch.float64)
    behaviour_NS[response_NS] = torch.tensor([x for line in fitting for x in line]).double()
    return behaviour_NS


def _batch(
    rows: Sequence[_Row],
    index: list[int],
    rollouts: Rollouts,
    scale: Scale,
    path: Path,
    notes: list[str],
) -> UpdateBatch | None:
    rewards = [row.reward for row in rows if row.reward is not None]
    reward_N = torch.tensor(rewards, dtype=torch.float64) if len(rewards) == len(rows) else None
    advantages = [row.advantage for row in rows if row.advantage is not None]
    if len(advantages) == len(rows):
        advantage_N = torch.tensor(advantages, dtype=torch.float64)
    elif reward_N is None:
        if advantages or rewards:
            raise ValueError(
                f"{path}: {len(advantages)} advantages and {len(rewards)} rewards for {len(rows)} "
                "rollouts; expected one of either for each."
            )
        return None
    elif all(row.group is not None for row in rows):
        order: dict[str | None, int] = {}
        group_N = torch.tensor([order.setdefault(row.group, len(order)) for row in rows])
        last_N = torch.tensor(_last_outputs(rows))
        compared = last_N.unique()
        advantage_of_last_N = torch.zeros_like(reward_N)
        advantage_of_last_N[compared] = advantages_by_prompt(scale)(
            reward_N[compared], group_N[compared]
        )
        advantage_N = advantage_of_last_N[last_N]
        if len(compared) < len(rows):
            notes.append(
                f"{len(rows)} outputs of {len(compared)} rollouts: the last output of each is "
                "compared, and its advantage is that of the others"
            )
        notes.append(
            f"advantages were computed from the scores (assumed: group-relative, scale {scale!r}; "
            f"{len(order)} groups)"
        )
    else:
        sizes = torch.bincount(torch.tensor(index))
        if len(set(sizes.tolist())) > 1:
            raise ValueError(
                f"{path}: prompts have between {int(sizes.min())} and {int(sizes.max())} responses "
                "and no advantages are given; expected groups of one size. Add an 'advantage' to "
                "each rollout, or drop the incomplete groups."
            )
        advantage_N = group_advantages(reward_N, int(sizes[0]), scale)
        notes.append(f"advantages were computed from rewards (scale {scale!r})")
    return UpdateBatch(
        rollouts=rollouts,
        advantage_NS=torch.where(rollouts.response_NS, advantage_N[:, None], 0.0),
        reward_N=reward_N,
    )


def _last_outputs(rows: Sequence[_Row]) -> list[int]:
    """For each row, the index of its rollout's last output: its own where it has no other."""
    last: dict[str, tuple[int, int]] = {}
    for at, row in enumerate(rows):
        if row.session is not None:
            rollout, number = row.session
            last[rollout] = max(last.get(rollout, (-1, -1)), (number, at))
    return [at if row.session is None else last[row.session[0]][1] for at, row in enumerate(rows)]


def read_parquet(path: Path, *, check: Callable[[Any], None] | None = None) -> list[dict[str, Any]]:
    """The rows of a parquet file; `check` sees its schema before any value is read."""
    schema = read_parquet_schema(path)
    if check is not None:
        check(schema)
    import pyarrow
    import pyarrow.parquet

    try:
        records = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet ({short(error)}).") from error
    if not records:
        raise ValueError(f"{path} has no rows.")
    return records


def read_parquet_schema(path: Path) -> Any:
    """Names and types of a parquet file's columns."""
    if not path.is_file():
        raise FileNotFoundError(f"No such file: {path}. TRL writes completions_NNNNN.parquet.")
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet ({short(error)}).") from error


def _reward_columns(path: Path, records: Sequence[Line], wanted: Sequence[str] | None) -> list[str]:
    columns = list(records[0])
    if wanted is not None:
        missing = [name for name in wanted if name not in columns]
        if missing:
            raise ValueError(f"{path} has no reward columns {missing}; got {columns}.")
        return list(wanted)

    def numbers(name: str) -> bool:
        values = [record[name] for record in records]
        kinds = (int, float, type(None))
        return all(isinstance(x, kinds) and not isinstance(x, bool) for x in values)

    return [name for name in columns if name not in ("step", *ADVANTAGE) and numbers(name)]


def _first(record: Line, names: Sequence[str]) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


def _ids(where: str, record: Line, names: Sequence[str]) -> list[int] | None:
    value = _first(record, names)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(x) is int and x >= 0 for x in value):
        raise ValueError(f"{where}: {names[0]} must be a list of token ids; got {str(value)[:60]}.")
    return value


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _optional(where: str, record: Line, names: Sequence[str]) -> float | None:
    value = _first(record, names)
    if value is None:
        return None
    if not is_finite_number(value):
        raise ValueError(
            f"{where}: {names[0]} is {short(repr(value), 40)}; expected a finite number."
        )
    return float(value)
