"""Rollouts as the model gets them (`Packed`): no left padding, and one row per prompt if possible.

    row        prompt | response 1 | response 2 | response 3
    position   0 .. p | p+1 ..     | p+1 ..     | p+1 ..
    looks at   itself | prompt and itself, never at another response

A causal model gives every token of such a row the state that it has in a rollout of its own, as
long as attention is all that tokens share, and it looks at all that came before: recurrent layers
and windows are not so. A window cannot be seen in a short trial, so only architectures that are
known (and in the tests) share, and `SequenceProcessor` tries it besides. Rows are as wide as the
widest: a long group among short ones goes into several, each with the prompt, and where rows of
their own are cheaper, there is no sharing. Who looks at whom is computed segment by segment, or
with a mask, the square of a row's length, where attention is the model's own affair.

    prompts     [R, H, P, P]      causal; P is the longest prompt
    responses   [M, H, L, P + L]  each looks at its own row's prompt and, causally, at itself

A row of p + sum L tokens has as many pairs squared; only p^2 / 2 + sum L (p + L / 2) of them count.
The square is worst where attention is differentiated: torch's MATH kernel writes it out several
times. Responses of much different lengths go in several parts, each padded to its longest.

The model does not know of this. It gets a stand-in for the square mask, and a torch function mode
catches `scaled_dot_product_attention` when it is called with that very object. Whatever else is
done with the stand-in is done with the true square, which is made then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from entropy_experiments.models.call_conditions import nothing_differentiated
from entropy_experiments.numerics.forward_mode import values_list
from entropy_experiments.types import Rollouts

CALL = 10_000
"""Pairs of padding that are worth one more call of attention.

Attention of one layer of SmolLM2-135M's shape, one busy core, the least milliseconds of several
rounds. Eight responses of 20 to 63 tokens (row of 392): without gradients 6.2 by the square and 5.0
by segments, jvp 39 to 61 and 20, backward 22 to 26 and 15; with one part or five instead of two,
jvp 22. Of 100 to 260 tokens (row of 1600): 132 and 34, 1316 and 158, 616 and 119.
"""
OF_THE_SQUARE = [
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda")
]
"""What the stand-in says of itself as the true mask would."""
ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
PAIR = 7e-4
"""What looking at one more token costs, in tokens through the layers. Measured with layers of
SmolLM2-135M's shape on one busy core: by segments 7e-4 without gradients and 1e-3 in forward mode,
in squares 7e-4 with the MATH kernel."""
KNOWN_MODELS = frozenset(
    (
        *("codegen", "deepseek_v3", "gemma", "gpt2", "gpt_neox", "gptj", "granite", "llama"),
        *("mistral", "mixtral", "olmo", "olmo2", "opt", "phi", "qwen2", "qwen3", "smollm3"),
        *("stablelm", "xglm"),
    )
)
"""Architectures that look at all that came before, unless their config says otherwise."""
WINDOWS = ("sliding_window", "attention_chunk_size")


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Responses of similar length, by where their tokens are among the R * S of all rows."""

    query_ML: Tensor
    key_MK: Tensor
    """The prompt's, then the response's own."""
    looks_MLK: Tensor
    """The first axis is 1 where all prompts have one length."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """What looks at what in R rows of S tokens."""

    shape: tuple[int, int]
    prompt: int
    parts: tuple[Part, ...]
    place_T: Tensor
    """Where the output of each of the R * S tokens is, among those of the prompts and the parts."""

    @classmethod
    def of(cls, rows: Sequence[tuple[int, Sequence[int]]], width: int) -> Segments:
        """From each row's length of prompt and lengths of responses, one after the other."""
        listed, longest = [], max(prompt for prompt, _ in rows)
        for r, (prompt, lengths) in enumerate(rows):
            at = prompt
            for length in lengths:
                listed.append(_Response(row=r, prompt=prompt, start=at, length=length))
                at += length
        # Padding, too, is given something finite: its row's first token's.
        place_RS = (torch.arange(len(rows)) * longest)[:, None].repeat(1, width)
        for r, (prompt, _) in enumerate(rows):
            place_RS[r, :prompt] += torch.arange(prompt)
        parts, past = [], len(rows) * longest
        for responses in _by_length([one for one in listed if one.length]):
            parts.append(_part(responses, width))
            size = parts[-1].query_ML.shape[1]
            for m, one in enumerate(responses):
                there = past + m * size + torch.arange(one.length)
                place_RS[one.row, one.start : one.start + one.length] = there
            past += len(responses) * size
        return cls(
            shape=(len(rows), width),
            prompt=longest,
            parts=tuple(parts),
            place_T=place_RS.flatten(),
        )

    def to(self, device: torch.device) -> Segments:
        parts = tuple(
            Part(**{name: x.to(device) for name, x in vars(part).items()}) for part in self.parts
        )
        place_T = self.place_T.to(device)
        return Segments(shape=self.shape, prompt=self.prompt, parts=parts, place_T=place_T)

    @property
    def pairs(self) -> int:
        """Pairs of tokens that are computed, padding included."""
        prompts = self.shape[0] * self.prompt**2
        return prompts + sum(part.query_ML.numel() * part.key_MK.shape[1] for part in self.parts)

    def attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """[R, H, S, D] of queries, keys and values of that shape (D of the values may differ)."""
        if enable_gqa:
            each = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(each, 1) for x in (key, value))
        attention = _fused if nothing_differentiated() else _written_out
        attention = partial(attention, scale=query.shape[-1] ** -0.5 if scale is None else scale)
        q, k, v = (x[:, :, : self.prompt].transpose(0, 1) for x in (query, key, value))
        outputs = [attention(q, k, v, _causal(self.prompt, query.device))]
        query, key, value = (x.transpose(0, 1).flatten(1, 2) for x in (query, key, value))
        for part in self.parts:
            q, k, v = (
                x_HTD.index_select(1, index.flatten()).unflatten(1, index.shape)
                for x_HTD, index in (
                    (query, part.query_ML),
                    (key, part.key_MK),
                    (value, part.key_MK),
                )
            )
            outputs.append(attention(q, k, v, part.looks_MLK))
        output_THD = torch.cat([x_HMLD.permute(1, 2, 0, 3).flatten(0, 1) for x_HMLD in outputs])
        return output_THD.index_select(0, self.place_T).unflatten(0, self.shape).transpose(1, 2)


def _causal(size: int, device: torch.device) -> Tensor:
    return torch.ones(1, size, size, dtype=torch.bool, device=device).tril()


def _fused(q: Tensor, k: Tensor, v: Tensor, looks_MLK: Tensor, *, scale: float) -> Tensor:
    attention = nn.functional.scaled_dot_product_attention
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return attention(q, k, v, attn_mask=looks_MLK[:, None], scale=scale).transpose(0, 1)


def _written_out(q: Tensor, k: Tensor, v: Tensor, looks_MLK: Tensor, *, scale: float) -> Tensor:
    """softmax(scale q k' + mask) v of [H, M, L, D], in fp32 at least, as torch's MATH kernel.

    That one also looks for queries that may look at nothing, which takes as long as the softmax;
    here every query looks at itself.
    """
    dtype, shape = q.dtype, q.shape[:2]
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)).flatten(0, 1) for x in (q, k, v))
    mask_MLK = torch.zeros_like(looks_MLK, dtype=q.dtype).masked_fill(~looks_MLK, -inf)
    if len(mask_MLK) > 1:
        mask_MLK = mask_MLK.repeat(shape[0], 1, 1)
    with torch.autocast(q.device.type, enabled=False):  # which would make both products in half
        weights = torch.baddbmm(mask_MLK, q, k.mT, alpha=scale).softmax(-1)
        return torch.bmm(weights, v).to(dtype).unflatten(0, shape)


@dataclass(frozen=True, kw_only=True)
class _Response:
    row: int
    prompt: int
    start: int
    length: int

    @property
    def pairs(self) -> int:
        return self.length * (self.prompt + self.length)


def _by_length(responses: Sequence[_Response]) -> list[list[_Response]]:
    """Longest first; a new part begins where padding would cost more than another call."""
    parts: list[list[_Response]] = []
    padding = prompt = 0
    for one in sorted(responses, key=lambda one: -one.length):
        if parts:
            longest, part = parts[-1][0].length, parts[-1]
            prompt = max(prompt, one.prompt)
            padding = (len(part) + 1) * longest * (prompt + longest)
            padding -= one.pairs + sum(other.pairs for other in part)
        if not parts or padding > CALL:
            parts.append([])
            prompt = one.prompt
        parts[-1].append(one)
    return parts


def _part(responses: Sequence[_Response], width: int) -> Part:
    row_M, prompt_M, start_M, length_M = (
        torch.tensor([getattr(one, name) for one in responses])
        for name in ("row", "prompt", "start", "length")
    )
    most, longest = int(prompt_M.max()), int(length_M.max())
    column_P, column_L = torch.arange(most), torch.arange(longest)
    # Beyond its end a response repeats its last token: finite, looked at by none, and not read.
    own_ML = start_M[:, None] + torch.minimum(column_L, length_M[:, None] - 1)
    prompt_MP = torch.minimum(column_P, (prompt_M[:, None] - 1).clamp(min=0))
    begin_M1 = row_M[:, None] * width
    of_prompt_MLP = (column_P < prompt_M[:, None])[:, None].expand(-1, longest, -1)
    of_own_MLL = (column_L <= column_L[:, None]).expand(len(responses), -1, -1)
    looks_MLK = torch.cat([of_prompt_MLP, of_own_MLL], -1)
    return Part(
        query_ML=begin_M1 + own_ML,
        key_MK=begin_M1 + torch.cat([prompt_MP, own_ML], 1),
        looks_MLK=looks_MLK[:1].clone() if int(prompt_M.min()) == most else looks_MLK,
    )


class BySegments(TorchFunctionMode):
    """Inside, attention called with `mask` goes by segments; anything else is as it was."""

    def __init__(self, segments: Segments, square: Callable[[], Tensor]) -> None:
        super().__init__()
        self.segments, self.square = segments, square
        rows, width = segments.shape
        nothing = torch.zeros((), dtype=torch.bool, device=segments.place_T.device)
        self.mask = nothing.expand(rows, 1, width, width)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            named = dict(zip(ARGUMENTS, args)) | kwargs
            if self._understood(**named):
                rest = {name: named[name] for name in ("scale", "enable_gqa") if name in named}
                return self.segments.attended(*(named[name] for name in ARGUMENTS[:3]), **rest)
        if func not in OF_THE_SQUARE:
            args = tuple(self._true(x) for x in args)
            kwargs = {name: self._true(x) for name, x in kwargs.items()}
        return func(*args, **kwargs)

    def _true(self, x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(map(self._true, x)) if any(y is self.mask for y in x) else x
        return self.square() if x is self.mask else x

    def _understood(
        self,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> bool:
        rows, _, width, _ = self.mask.shape
        return (
            attn_mask is self.mask
            and not dropout_p
            and not is_causal
            and all(
                x.dim() == 4 and (x.shape[0], x.shape[2]) == (rows, width)
                for x in (query, key, value)
            )
            and query.device == self.segments.place_T.device
        )


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
    if config.model_type not in KNOWN_MODELS:
        return False
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    return not any(getattr(config, name, None) for name in WINDOWS)
