"""How a model counts positions, and where the factors of its rotary embedding change.

Most models count 0, 1, 2, .... RoBERTa and its descendants make positions from the tokens: padding
tokens stand at `padding_idx`, and the others are counted from `padding_idx + 1`. Which of the two a
model does is tried at construction (`trials`).

Two kinds of rotary embedding choose their factors by the longest sequence of a call, so that a
short rollout beside a long one gets the long one's:

    longrope      one set of factors up to the original context, another beyond it
    dynamic NTK   beyond the original context, factors of its own for every length

`Contexts` says which lengths may share a call. Beyond the original context the last token goes in,
too, though nothing is looked from it: without it a rollout would count as one token shorter than
in the model's own call. Dynamic NTK also keeps the factors of the longest call so far; inside
`fresh` it has seen nothing yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from entropy_experiments.numerics.forward_mode import values_list
from entropy_experiments.types import Rollouts


def position_ids(tokens_NS: Tensor, padding: int | None, real_NS: Tensor | None = None) -> Tensor:
    """Positions of the tokens; `padding`: the index that RoBERTa-like models count from.

    `real_NS`: where there is a token rather than padding, if that is not everywhere.
    """
    ones_NS = torch.ones_like(tokens_NS) if real_NS is None else real_NS.to(tokens_NS.dtype)
    if padding is None:
        return (ones_NS.cumsum(1) - 1).clamp_min(0)
    ones_NS = ones_NS * (tokens_NS != padding)
    return ones_NS.cumsum(1) * ones_NS + padding


def next_position_ids(
    token_N: Tensor, count_N: Tensor, padding: int | None
) -> tuple[Tensor, Tensor]:
    """Positions of the next tokens after so many that were counted, and how many there are then."""
    if padding is None:
        return count_N, count_N + 1
    one_N = (token_N != padding).to(count_N.dtype)
    return (count_N + one_N) * one_N + padding, count_N + one_N


def count_tokens(tokens_NS: Tensor, padding: int | None, real_NS: Tensor) -> Tensor:
    real_NS = real_NS.bool()
    return (real_NS if padding is None else real_NS & (tokens_NS != padding)).sum(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rotary:
    """One kind of layer's rotary embedding, if its factors depend on the call."""

    module: Any
    prefix: str
    """Of its attributes' names, where a module serves several kinds of layer."""
    context: int
    """Up to this many tokens, the factors are the original ones."""
    by_length: bool
    """Beyond, every length has factors of its own (dynamic NTK)."""

    def kind(self, length: int) -> int:
        """Lengths of the same kind get the same factors."""
        return 0 if length <= self.context else length if self.by_length else 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Contexts:
    """Which rollouts may be in one call of a model."""

    rotary: tuple[Rotary, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Contexts:
        return cls(rotary=tuple(one for module in model.modules() for one in _rotary(module)))

    @property
    def original(self) -> int | None:
        """The longest sequence with the original factors; None: there are no others."""
        return min((one.context for one in self.rotary), default=None)

    @property
    def by_length(self) -> bool:
        return any(one.by_length for one in self.rotary)

    def beyond(self, length: int) -> bool:
        return any(one.kind(length) for one in self.rotary)

    def groups(self, rollouts: Rollouts) -> list[Tensor]:
        """Rows of rollouts that get the same factors, in one call."""
        kinds: dict[tuple[int, ...], list[int]] = {}
        lengths = values_list(rollouts.attention_NS.sum(1)) if self.rotary else ()
        for row, length in enumerate(lengths):
            kinds.setdefault(tuple(one.kind(length) for one in self.rotary), []).append(row)
        if len(kinds) < 2:
            return [torch.arange(len(rollouts))]
        return [torch.tensor(rows) for rows in kinds.values()]

    @contextmanager
    def fresh(self) -> Iterator[None]:
        """Inside, no call has been made before; outside, each embedding is as it was."""
        mine = [one for one in self.rotary if one.by_length]
        before = [(one, one.module.__dict__.copy(), dict(one.module._buffers)) for one in mine]
        for one in mine:
            original = getattr(one.module, f"{one.prefix}original_inv_freq")
            one.module._buffers[f"{one.prefix}inv_freq"] = original
            setattr(one.module, f"{one.prefix}max_seq_len_cached", one.context)
        try:
            yield
        finally:
            for one, attributes, buffers in before:
                one.module.__dict__.update(attributes)
                one.module._buffers.clear()
                one.module._buffers.update(buffers)


def _rotary(module: Any) -> Iterator[Rotary]:
    kinds, config = getattr(module, "rope_type", None), getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None)
    if kinds is None or not parameters:
        return
    several = isinstance(kinds, dict)
    for layer, kind in kinds.items() if several else ((None, kinds),):
        prefix = f"{layer}_" if several else ""
        if "dynamic" in kind:
            context, by_length = module.original_max_seq_len, True
        elif kind == "longrope":
            own = parameters[layer] if several else parameters
            context, by_length = own["original_max_position_embeddings"], False
        else:
            continue
        yield Rotary(module=module, prefix=prefix, context=int(context), by_length=by_length)
