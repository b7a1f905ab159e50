"""Rollouts of one prompt in one row: the prompt is computed once, and nothing is padding.

    row        prompt | response 1 | response 2 | response 3
    position   0 .. p | p+1 ..     | p+1 ..     | p+1 ..
    looks at   itself | prompt and itself, never at another response

A causal model gives every token of such a row the state that it has in a rollout of its own, as
long as attention is all that tokens share, and it looks at all that came before: recurrent layers
and windows are not so. A window cannot be seen in a short trial, so only architectures that are
known (and in the tests) share, and `SequenceProcessor` tries it besides. The mask that says who
looks at whom is a square of the row's length: long groups go into several rows, each with the
prompt, and where rows of their own are cheaper, there is no sharing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.types import Rollouts

PAIR = 5e-4
"""What looking at one more token costs, in tokens through the layers. Two layouts of one batch on
SmolLM2-135M, one busy core, gave 7e-4 with the MATH kernel and about 0 with the fused one."""
KNOWN = frozenset(
    (
        *("codegen", "deepseek_v3", "gemma", "gpt2", "gpt_neox", "gptj", "granite", "llama"),
        *("mistral", "mixtral", "olmo", "olmo2", "opt", "phi", "qwen2", "qwen3", "smollm3"),
        *("stablelm", "xglm"),
    )
)
"""Architectures that look at all that came before, unless their config says otherwise."""
WINDOWS = ("sliding_window", "attention_chunk_size")


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Tokens as the model sees them, and where each rollout's states are then, but for its last."""

    tokens_RS: Tensor
    position_RS: Tensor
    looks_R1SS: Tensor
    """True where a token (third axis) may look at another (last axis)."""
    row_NS: Tensor
    column_NS: Tensor

    @property
    def place(self) -> tuple[Tensor, Tensor]:
        return self.row_NS, self.column_NS


def shared_rows(rollouts: Rollouts, widest: int | None = None) -> Rows | None:
    """Rows of rollouts whose padding is on the right, of at most `widest` tokens if that can be.

    None: no two of them share a prompt, or rows of their own cost less.
    """
    device = rollouts.tokens_NS.device
    # A rollout's last token is drawn and never looked from: it need not go in.
    length_N = (rollouts.attention_NS.sum(1) - 1).tolist()
    prompt_N = rollouts.response_NS.int().argmax(1).tolist()
    tokens_NS = rollouts.tokens_NS.cpu()
    mates: dict[tuple[int, ...], list[int]] = {}
    for i, tokens_S in enumerate(tokens_NS):
        mates.setdefault(tuple(tokens_S[: prompt_N[i]].tolist()), []).append(i)
    if len(mates) == len(rollouts):
        return None
    rows = [
        (len(prompt), some)
        for prompt, found in mates.items()
        for some in _divided(len(prompt), found, length_N, widest)
    ]
    width = max(p + sum(length_N[i] - p for i in some) for p, some in rows)
    if _cost(len(rows), width) >= _cost(len(rollouts), max(length_N)):
        return None
    tokens_RS = torch.zeros(len(rows), width, dtype=torch.int64)
    position_RS = torch.zeros_like(tokens_RS)
    # Padding is a response of its own: it looks at something, and nothing looks at it.
    segment_RS = torch.full_like(tokens_RS, -1)
    row_NS, column_NS = torch.zeros_like(tokens_NS), torch.zeros_like(tokens_NS)
    for r, (p, some) in enumerate(rows):
        tokens_RS[r, :p] = tokens_NS[some[0], :p]
        position_RS[r, :p] = torch.arange(p)
        segment_RS[r, :p] = 0
        at = p
        for k, i in enumerate(some, start=1):
            end = at + length_N[i] - p
            tokens_RS[r, at:end] = tokens_NS[i, p : length_N[i]]
            position_RS[r, at:end] = torch.arange(p, length_N[i])
            segment_RS[r, at:end] = k
            row_NS[i] = r
            column_NS[i, :p] = torch.arange(p)
            column_NS[i, p : length_N[i]] = torch.arange(at, end)
            at = end
    return Rows(
        tokens_RS=tokens_RS.to(device),
        position_RS=position_RS.to(device),
        looks_R1SS=_looks(segment_RS.to(device)),
        row_NS=row_NS.to(device),
        column_NS=column_NS.to(device),
    )


def _looks(segment_RS: Tensor) -> Tensor:
    asked_RS1, seen_R1S = segment_RS[:, :, None], segment_RS[:, None, :]
    mine = (seen_R1S == asked_RS1) | ((seen_R1S == 0) & (asked_RS1 > 0))
    return (mine & mine.new_ones(mine.shape[1:]).tril())[:, None]


def _cost(rows: int, width: int) -> float:
    return rows * (width + PAIR * width**2)


def _divided(
    prompt: int, mates: Sequence[int], length_N: Sequence[int], widest: int | None
) -> list[list[int]]:
    """The rollouts of one prompt in as many rows as are cheapest, of about equal length."""

    def cost(rows: list[list[int]]) -> float:
        sizes = [prompt + sum(length_N[i] - prompt for i in row) for row in rows]
        # A row of a single rollout may be as wide as it is: it would be, anyway.
        if widest is not None and max(sizes) > widest and len(rows) < len(mates):
            return inf
        return sum(_cost(1, size) for size in sizes)

    longest_first = sorted(mates, key=lambda i: -length_N[i])
    dealt = ([longest_first[k::count] for k in range(count)] for count in range(1, len(mates) + 1))
    return min(dealt, key=cost)


def may_share(config: Any) -> bool:
    """Whether every layer of a model of this config looks at all that came before."""
    if config.model_type not in KNOWN:
        return False
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    return not any(getattr(config, name, None) for name in WINDOWS)
