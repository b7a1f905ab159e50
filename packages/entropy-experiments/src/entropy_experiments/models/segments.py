"""Attention of rows that share a prompt, segment by segment instead of in a square.

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
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from entropy_experiments.models.call_conditions import nothing_differentiated

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
