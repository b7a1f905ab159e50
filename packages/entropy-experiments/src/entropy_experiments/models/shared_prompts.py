"""Rollouts as the model gets them (`Packed`): no left padding, and one row per prompt if possible.

    row        prompt | response 1 | response 2 | response 3
    position   0 .. p | p+1 ..     | p+1 ..     | p+1 ..
    looks at   itself | prompt and itself, never at another response

A causal model gives every token of such a row the state that it has in a rollout of its own, as
long as attention is all that tokens share, and it looks at all that came before: recurrent layers
and windows are not so. A window cannot be seen in a short trial, so only architectures that are
known (and in the tests) share, and `SequenceProcessor` tries it besides. Rows are as wide as the
widest: a long group among short ones goes into several, each with the prompt, and where rows of
their own are cheaper, there is no sharing. Who looks at whom is computed by `segments`, or with a
mask, the square of a row's length, where attention is the model's own affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.models.segments import BySegments, Segments
from entropy_experiments.numerics.forward_mode import values_list
from entropy_experiments.types import Rollouts

PAIR = 7e-4
"""What looking at one more token costs, in tokens through the layers. Measured with layers of
SmolLM2-135M's shape on one busy core: by segments 7e-4 without gradients and 1e-3 in forward mode,
in squares 7e-4 with the MATH kernel."""
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
class Packed:
    """Rollouts in rows of their own or shared, and the way back."""

    rollouts: Rollouts
    original: Rollouts
    start_N: Tensor
    rows: Rows | None

    @classmethod
    def of(cls, rollouts: Rollouts, device: torch.device) -> Packed:
        length_N = rollouts.attention_NS.sum(1)
        start_N = rollouts.attention_NS.int().argmax(1)
        column_S = torch.arange(int(length_N.max()), device=length_N.device)
        inside_NS = column_S < length_N[:, None]
        source_NS = (start_N[:, None] + column_S).clamp(max=rollouts.tokens_NS.shape[1] - 1)
        tokens_NS = rollouts.tokens_NS.gather(1, source_NS)
        packed = replace(
            rollouts,
            # Whatever stood in the padding (-100, say) must be a token that can be embedded, and
            # an ordinary one: where the row of a padding token is zero, a model may have states of
            # no spread there, and a derivative that is not finite. Nothing looks at it, but zero
            # times NaN is NaN.
            tokens_NS=torch.where(inside_NS, tokens_NS, tokens_NS[:, :1]).to(device),
            attention_NS=inside_NS.to(device),
            response_NS=(inside_NS & rollouts.response_NS.gather(1, source_NS)).to(device),
            prompt_N=rollouts.prompt_N.to(device),
            weight_N=rollouts.weight_N.to(device),
            truncated_N=rollouts.truncated_N.to(device),
            behaviour_logprob_NS=None,
            text=None,
        )
        return cls(rollouts=packed, original=rollouts, start_N=start_N, rows=None)

    @property
    def inputs(self) -> Tensor:
        """Tokens as the model gets them."""
        return self.rollouts.tokens_NS if self.rows is None else self.rows.tokens_RS

    @property
    def place(self) -> tuple[Tensor, Tensor] | None:
        """Row and column of every token's state; None: those of the rollouts."""
        return None if self.rows is None else self.rows.place

    def back(self, x_NS: Tensor) -> Tensor:
        """From packed columns to those of the rollouts as given, on their device."""
        column_S = torch.arange(self.original.tokens_NS.shape[1], device=self.start_N.device)
        source_NS = (column_S - self.start_N[:, None]).clamp(0, x_NS.shape[1] - 1)
        x_NS = x_NS.to(source_NS.device)
        return torch.where(self.original.response_NS, x_NS.gather(1, source_NS), 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Tokens as the model sees them, and where each rollout's states are then, but for its last."""

    tokens_RS: Tensor
    position_RS: Tensor
    segment_RS: Tensor
    """0: prompt; 1, 2, ...: responses; -1: padding."""
    sizes: tuple[tuple[int, tuple[int, ...]], ...]
    """Each row's length of prompt and lengths of responses."""
    row_NS: Tensor
    column_NS: Tensor

    @cached_property
    def looks_R1SS(self) -> Tensor:
        """True where a token (third axis) may look at another (last axis)."""
        return _looks(self.segment_RS)

    @cached_property
    def segments(self) -> Segments:
        width = self.tokens_RS.shape[1]
        return Segments.of(self.sizes, width).to(self.tokens_RS.device)

    def by_segments(self) -> BySegments:
        """Inside, attention with this one's `mask` never makes the square."""
        return BySegments(self.segments, lambda: self.looks_R1SS)

    @property
    def place(self) -> tuple[Tensor, Tensor]:
        return self.row_NS, self.column_NS


def shared_rows(
    rollouts: Rollouts, widest: int | None = None, *, square: bool = False
) -> Rows | None:
    """Rows of rollouts whose padding is on the right, of at most `widest` tokens if that can be.

    None: no two of them share a prompt, or rows of their own cost less. With `square`, every token
    is compared to every other of its row.
    """
    device = rollouts.tokens_NS.device
    # A rollout's last token is drawn and never looked from: it need not go in.
    length_N = values_list(rollouts.attention_NS.sum(1) - 1)
    prompt_N = values_list(rollouts.response_NS.int().argmax(1))
    tokens_NS = rollouts.tokens_NS.cpu()
    mates: dict[tuple[int, ...], list[int]] = {}
    for i, tokens_S in enumerate(tokens_NS):
        mates.setdefault(tuple(values_list(tokens_S[: prompt_N[i]])), []).append(i)
    if len(mates) == len(rollouts):
        return None
    groups = [(len(prompt), members) for prompt, members in mates.items()]
    rows = _cheapest(groups, length_N, widest, square)
    if rows is None:
        return None
    sizes = tuple((p, tuple(length_N[i] - p for i in some)) for p, some in rows)
    width = max(p + sum(lengths) for p, lengths in sizes)
    tokens_RS = torch.zeros(len(rows), width, dtype=torch.int64)
    position_RS = torch.zeros_like(tokens_RS)
    # Padding is a response of its own: it looks at something, and nothing looks at it.
    segment_RS = torch.full_like(tokens_RS, -1)
    row_NS, column_NS = torch.zeros_like(tokens_NS), torch.zeros_like(tokens_NS)
    for r, (p, some) in enumerate(rows):
        tokens_RS[r] = tokens_NS[some[0], 0]  # padding is an ordinary token, as in `Packed`
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
        segment_RS=segment_RS.to(device),
        sizes=sizes,
        row_NS=row_NS.to(device),
        column_NS=column_NS.to(device),
    )


def _looks(segment_RS: Tensor) -> Tensor:
    query_RS1, key_R1S = segment_RS[:, :, None], segment_RS[:, None, :]
    mine = (key_R1S == query_RS1) | ((key_R1S == 0) & (query_RS1 > 0))
    return (mine & mine.new_ones(mine.shape[1:]).tril())[:, None]


def _cheapest(
    groups: Sequence[tuple[int, list[int]]],
    length_N: Sequence[int],
    widest: int | None,
    square: bool,
) -> list[tuple[int, list[int]]] | None:
    """Every prompt's rollouts in one row or several; None: each in its own."""
    dealt = [
        [(rows, _width(prompt, rows, length_N)) for rows in _dealt(mates, length_N)]
        for prompt, mates in groups
    ]
    # Rows in which each rollout is alone may be as wide as they are: they would be, anyway.
    alone = max(length_N)
    widths = {width for ways in dealt for _, width in ways if widest is None or width <= widest}
    best, least = None, len(length_N) * (alone + PAIR * alone**2)
    for width in sorted({width for width in widths if width > alone} | {alone}):
        rows = [
            (prompt, row)
            for (prompt, _), ways in zip(groups, dealt, strict=True)
            for row in next(rows for rows, needs in ways if needs <= width)
        ]
        cost = _cost(rows, length_N, square)
        if len(rows) < len(length_N) and cost < least:
            best, least = rows, cost
    return best


def _dealt(mates: Sequence[int], length_N: Sequence[int]) -> list[list[list[int]]]:
    """The rollouts of one prompt in one row, in two, ..., of about equal length."""
    longest_first = sorted(mates, key=lambda i: -length_N[i])
    return [[longest_first[k::n] for k in range(n)] for n in range(1, len(mates) + 1)]


def _width(prompt: int, rows: Sequence[Sequence[int]], length_N: Sequence[int]) -> int:
    return prompt + max(sum(length_N[i] - prompt for i in row) for row in rows)


def _cost(
    rows: Sequence[tuple[int, Sequence[int]]], length_N: Sequence[int], square: bool
) -> float:
    """In tokens through the layers, padding included."""
    width = max(_width(prompt, [row], length_N) for prompt, row in rows)
    pairs = len(rows) * width**2
    if not square:
        # Every response's with the prompt and itself; and the prompts', padded to the longest.
        pairs = len(rows) * max(prompt for prompt, _ in rows) ** 2
        pairs += sum((length_N[i] - prompt) * length_N[i] for prompt, row in rows for i in row)
    return len(rows) * width + PAIR * pairs


def may_share(config: Any) -> bool:
    """Whether every layer of a model of this config looks at all that came before."""
    if config.model_type not in KNOWN:
        return False
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    return not any(getattr(config, name, None) for name in WINDOWS)
