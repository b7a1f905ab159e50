"""Rollouts that a framework dumped as token ids, put together into one update batch.

A reader makes a `DumpRow` of each rollout; `assemble` pads, numbers the prompts and checks what the
mathematics relies upon. In every list entry s is about token s, as in `Rollouts`:

    prompt     the tokens before the first one that the policy drew
    response   tokens that the policy drew; holes are tool output and later user turns
    counted    response tokens that the loss counts, if not all

Numbers outside the response are no numbers of this batch (trainers leave padding, zeros or null
there): they are not looked at and become 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.input_errors import is_finite_number, short
from entropy_experiments.sampling.text_dumps import Imported
from entropy_experiments.types import Rollouts, UpdateBatch
from entropy_experiments.types.rollouts import SCORE_TOLERANCE

Line = Mapping[str, Any]
"""One rollout as the file has it: values by column."""


@dataclass(frozen=True, kw_only=True)
class DumpRow:
    """One rollout; every list has an entry per token."""

    where: str
    """File and line, for messages."""
    tokens: list[int]
    response: list[bool]
    counted: list[bool] | None = None
    """None: the loss counts every response token."""
    advantage: list[float] | None = None
    old_logprob: list[float] | None = None
    behaviour_logprob: list[float] | None = None
    reward: float | None = None
    uid: str | None = None
    microbatch: int | None = None
    truncated: bool = False


@dataclass(frozen=True, kw_only=True)
class DumpFacts:
    """What a reader says of its dump."""

    format: str
    used: Mapping[str, str]
    """What each stored column is used for."""
    missing: tuple[str, ...]
    """What an analysis would like to know and the dump does not hold."""
    notes: tuple[str, ...] = ()
    step: int | None = None
    """Number N of a step that led from checkpoint N - 1 to checkpoint N; None: it is not known."""


def assemble(
    rows: Sequence[DumpRow], facts: DumpFacts, *, tokenizer: Any, vocabulary: int | None
) -> Imported:
    """The rollouts of a dump in the dump's order, as a batch if they have advantages.

    Args:
        rows: One for each rollout.
        facts: Of the dump.
        tokenizer: For the texts and the padding.
        vocabulary: Number of token ids; None: the tokenizer's.
    """
    notes = [*facts.notes, *order_note(facts.step)]
    empty = [row for row in rows if not any(row.response)]
    rows = [row for row in rows if any(row.response)]
    if not rows:
        raise ValueError(
            f"{empty[0].where}: no rollout of the dump has a token in the loss ({len(empty)} "
            "rollouts); expected at least one. Was everything masked?"
        )
    if empty:
        notes.append(
            f"{len(empty)} rollouts without a token in the loss are left out (the first: "
            f"{empty[0].where}); a loss that averages over rollouts counted them"
        )
    _check_tokens(rows, len(tokenizer) if vocabulary is None else vocabulary)
    notes += [f"{column}: {use}" for column, use in facts.used.items()]
    if facts.missing:
        notes.append(f"not in the dump: {'; '.join(facts.missing)}")
    rollouts = _rollouts(rows, tokenizer)
    return Imported(
        rollouts=rollouts,
        batch=_batch(rows, rollouts),
        mismatched=0,
        notes=tuple(notes),
        format=facts.format,
        used=dict(facts.used),
        missing=facts.missing,
        made_from=None if facts.step is None else facts.step - 1,
    )


def order_note(step: int | None) -> tuple[str, ...]:
    """Between which checkpoints a step lies, where dumps and checkpoints are numbered alike."""
    if step is None:
        return ()
    return (f"step {step} led from checkpoint {step - 1} to checkpoint {step}",)


def _check_tokens(rows: Sequence[DumpRow], vocabulary: int) -> None:
    for row in rows:
        if row.response[0]:
            raise ValueError(
                f"{row.where}: the first token is in the loss; expected at least one token of a "
                "prompt before it. Was the prompt cut off?"
            )
        highest = max(row.tokens)
        if highest >= vocabulary:
            raise ValueError(
                f"{row.where}: token id {highest} is out of the vocabulary, which has "
                f"{vocabulary} tokens. The dump was made with another model: give that one's "
                "checkpoint."
            )


def _rollouts(rows: Sequence[DumpRow], tokenizer: Any) -> Rollouts:
    width = max(len(row.tokens) for row in rows)
    pad = getattr(tokenizer, "pad_token_id", None)

    def padded(values: Sequence[Sequence[Any]], fill: Any) -> Tensor:
        return torch.tensor([[*line, *[fill] * (width - len(line))] for line in values])

    order: dict[tuple[int, ...], int] = {}
    prompts = [tuple(row.tokens[: row.response.index(True)]) for row in rows]
    drawn = [[t for t, mine in zip(row.tokens, row.response) if mine] for row in rows]
    return Rollouts(
        tokens_NS=padded([row.tokens for row in rows], 0 if pad is None else pad),
        attention_NS=padded([[True] * len(row.tokens) for row in rows], False),
        response_NS=padded([row.response for row in rows], False),
        prompt_N=torch.tensor([order.setdefault(prompt, len(order)) for prompt in prompts]),
        behaviour_logprob_NS=_numbers(rows, "behaviour_logprob", width),
        truncated_N=torch.tensor([row.truncated for row in rows]),
        text=tuple(tokenizer.decode(ids) for ids in drawn),
        uid=None if all(row.uid is None for row in rows) else tuple(row.uid for row in rows),
    )


def _batch(rows: Sequence[DumpRow], rollouts: Rollouts) -> UpdateBatch | None:
    width = rollouts.tokens_NS.shape[1]
    advantage_NS = _numbers(rows, "advantage", width)
    if advantage_NS is None:
        return None
    rewards = [row.reward for row in rows]
    microbatches = [row.microbatch for row in rows]
    loss_NS = rollouts.response_NS.clone()
    for n, row in enumerate(rows):
        if row.counted is not None:
            loss_NS[n, : len(row.counted)] &= torch.tensor(row.counted)
    return UpdateBatch(
        rollouts=rollouts,
        advantage_NS=advantage_NS,
        reward_N=None if None in rewards else torch.tensor(rewards, dtype=torch.float64),
        old_logprob_NS=_numbers(rows, "old_logprob", width),
        microbatch_N=None if None in microbatches else torch.tensor(microbatches),
        loss_NS=None if torch.equal(loss_NS, rollouts.response_NS) else loss_NS,
    )


def _numbers(rows: Sequence[DumpRow], name: str, width: int) -> Tensor | None:
    """[N, S] in fp64, 0 outside the response; None where no row has them."""
    lines = [getattr(row, name) for row in rows]
    if any(line is None for line in lines):
        return None
    out_NS = torch.zeros(len(rows), width, dtype=torch.float64)
    for n, (row, line) in enumerate(zip(rows, lines, strict=True)):
        kept = [x if mine else 0.0 for x, mine in zip(line, row.response, strict=True)]
        out_NS[n, : len(kept)] = torch.tensor(kept, dtype=torch.float64)
    return out_NS


def required(where: str, line: Line, names: Sequence[str], framework: str) -> None:
    """Refuse a line without one of these columns."""
    missing = [name for name in names if line.get(name) is None]
    if missing:
        raise ValueError(
            f"{where}: lacks {missing}; expected every column of {framework}'s dump. Got "
            f"{sorted(line)}."
        )


def token_ids(where: str, name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{where}: {name} is {short(repr(value), 60)}; expected a list of token ids."
        )
    for at, token in enumerate(value):
        if type(token) is not int or token < 0:
            raise ValueError(
                f"{where}: {name}[{at}] is {short(repr(token), 40)}; expected token ids, whole "
                "numbers from 0."
            )
    return value


def mask(where: str, name: str, value: Any, length: int) -> list[bool]:
    """Zeros and ones, however they are written."""
    values = entries(where, name, value, length)
    for at, one in enumerate(values):
        if not isinstance(one, (bool, int, float)) or one not in (0, 1):
            raise ValueError(f"{where}: {name}[{at}] is {short(repr(one), 40)}; expected 0 or 1.")
    return [bool(one) for one in values]


def numbers(where: str, name: str, value: Any, response: Sequence[bool]) -> list[float]:
    """One number per token, finite on the response; elsewhere 0."""
    values = entries(where, name, value, len(response))
    out = []
    for at, (one, mine) in enumerate(zip(values, response, strict=True)):
        if mine and not is_finite_number(one):
            raise ValueError(
                f"{where}: {name}[{at}] is {short(repr(one), 40)} on a token of the response; "
                "expected a finite number."
            )
        out.append(float(one) if mine else 0.0)
    return out


def logprobs(where: str, name: str, value: Any, response: Sequence[bool]) -> list[float]:
    values = numbers(where, name, value, response)
    for at, one in enumerate(values):
        if one > SCORE_TOLERANCE:
            raise ValueError(
                f"{where}: {name}[{at}] is {one:g}; expected log-probs, which are never above 0. "
                "Take the logarithm of probabilities, or the negative of a loss."
            )
    return values


def entries(where: str, name: str, value: Any, length: int) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: {name} is {short(repr(value), 60)}; expected a list.")
    if len(value) != length:
        raise ValueError(
            f"{where}: {name} has {len(value)} entries for {length} tokens; expected one for each."
        )
    return value


def finite_number(where: str, name: str, value: Any) -> float:
    if not is_finite_number(value):
        raise ValueError(f"{where}: {name} is {short(repr(value), 40)}; expected a finite number.")
    return float(value)


def count_from_zero(where: str, name: str, values: Sequence[Any], advice: str) -> None:
    """Refuse rows that are not numbered 0, 1, 2, ...: some are missing, doubled or exchanged."""
    for at, value in enumerate(values):
        if type(value) is not int or value != at:
            twice = value in values[:at]
            what = "stands twice" if twice else f"comes where {at} should"
            raise ValueError(
                f"{where}: {name} {short(repr(value), 40)} {what}; expected 0 to "
                f"{len(values) - 1} in order. {advice}"
            )


def one_step(path: Any, steps: Sequence[Any], named: int | None = None) -> int:
    """The one step that all rows belong to; `named`: what the file's name says."""
    for step in steps:
        if type(step) is not int:
            raise ValueError(f"{path}: step is {short(repr(step), 40)}; expected a whole number.")
    kinds = sorted(set(steps))
    if len(kinds) > 1:
        raise ValueError(
            f"{path} mixes the steps {kinds[:6]}; expected those of one optimizer step. Was it put "
            "together from several files?"
        )
    if named is not None and kinds[0] != named:
        raise ValueError(
            f"{path} is named after step {named} and holds step {kinds[0]}; expected the same. Was "
            "it renamed?"
        )
    return kinds[0]
