"""Batches small enough to enumerate, and their entropies and log-probs in fp64.

A scene is a table of logits, one row per token and position, and sequences over seven tokens. Row t
of a sequence's logits is the distribution of token t + 1. So with z = row t - 1 / temperature:

    h_t = log sum_v exp z_v - sum_v p_v z_v          l_t = z_y - log sum_v exp z_v,  y = token t

Two things are unusual. The rows that score a response are equal in all scenes but those about the
shift and the attention mask, so that a function with one mistake fails the one case that is about
it: where rows are equal, a shift by one cannot be seen. And all logits but those of the precision
scenes are multiples of 1/8 that bf16 holds exactly, so that a cast cannot be seen either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 128
WIDE = 36_000
"""Wider than a chunk that is likely to be written into a function (32768), no multiple of one."""
LIVE = 8
"""Tokens with any probability in the narrow scenes: a hidden top-20 changes nothing there."""
DEAD = -60.0
PHASES = 3
PAD = 0
PROMPT = 7
RESPONSE = 4

# Logits of the live tokens in eighths: for sequences of {1, 2}, of {3, 4}, of {5, 6}, prompts.
_LEVELS = (
    (-16, 40, 24, -8, -16, 0, -24, -32),
    (-8, 8, -16, 28, 12, -4, -16, -24),
    (2, 4, -4, 0, -2, 10, 6, 4),
    (0, 0, 0, 0, 0, 0, 0, 0),
)
_LEVEL_OF_TOKEN = (3, 0, 0, 1, 1, 2, 2, 3)
# (prompt, response) of three sequences; the last token of a prompt is of the sequence's own level.
_TALKS = (
    ((PROMPT, PROMPT, 1), (1, 1, 1, 2)),
    ((PROMPT, 4), (3, 3, 4, 3)),
    ((6,), (5, 6, 6, 5)),
)


def log_softmax(logits: Tensor) -> Tensor:
    """In fp64, whatever came in; -inf where a token is banned."""
    z = logits.double()
    d = z - z.max(-1, keepdim=True).values
    return d - d.exp().sum(-1, keepdim=True).log()


def entropy(logprob: Tensor) -> Tensor:
    """-sum p log p over the last axis, with 0 log 0 = 0."""
    p = logprob.exp()
    return -torch.where(p > 0, p * logprob, 0.0).sum(-1)


def top_k(logits: Tensor, k: int) -> Tensor:
    """-inf outside the k largest, as generation's top-k filter leaves the logits."""
    kept = logits.topk(k, -1).indices
    return torch.full_like(logits, -math.inf).scatter(-1, kept, logits.gather(-1, kept))


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One batch and all that a function may ask to be told about it."""

    label: str
    table_RV: Tensor
    ids_NS: Tensor
    attention_NS: Tensor
    response_NS: Tensor
    temperature: float = 1.0
    top_k: int | None = None
    chunk_size: int | None = None
    shards: tuple[Scene, ...] = ()
    """The same batch as ranks hold it."""

    @property
    def keep(self) -> int | None:
        """Columns of the response, where it is one block at the end of every row."""
        first = int(self.response_NS.int().argmax(1).min())
        aligned = bool((self.response_NS[:, first]).all())
        return self.ids_NS.shape[1] - first if aligned else None

    @property
    def logits_NSV(self) -> Tensor:
        return self.table_RV[rows_of(self.ids_NS, self.attention_NS)]

    def values(
        self,
        quantity: str,
        *,
        lag: int = 1,
        temperature: float | None = None,
        logits_NSV: Tensor | None = None,
    ) -> Tensor:
        """fp64 values by token: column t from row t - lag. NaN where there is no such row."""
        logits = self.logits_NSV if logits_NSV is None else logits_NSV
        z_NSV = logits.double() / (self.temperature if temperature is None else temperature)
        if logits_NSV is None and self.top_k is not None:
            z_NSV = top_k(z_NSV, self.top_k)
        return self.by_token(quantity, log_softmax(z_NSV), lag=lag)

    def by_token(self, quantity: str, logprob_NSV: Tensor, *, lag: int = 1) -> Tensor:
        """Entropies or log-probs from a distribution of the tokens, which may be a mistaken one."""
        row_S = torch.arange(self.ids_NS.shape[1]) - lag
        if quantity == "entropy":
            value_NS = entropy(logprob_NSV)[:, row_S.clamp(min=0)]
        else:
            at_NSV = logprob_NSV[:, row_S.clamp(min=0)]
            value_NS = at_NSV.gather(-1, self.ids_NS[..., None])[..., 0]
            value_NS = -value_NS if quantity == "surprisal" else value_NS
        return torch.where(row_S >= 0, value_NS, torch.nan)

    def pick(self, order: Sequence[int]) -> Scene:
        rows = list(order)
        return replace(
            self,
            ids_NS=self.ids_NS[rows],
            attention_NS=self.attention_NS[rows],
            response_NS=self.response_NS[rows],
        )


def rows_of(
    ids_NS: Tensor, attention_NS: Tensor | None, position_NS: Tensor | None = None
) -> Tensor:
    """Which row of the table predicts the token after each token: by token and real position."""
    if position_NS is None:
        attended = torch.ones_like(ids_NS) if attention_NS is None else attention_NS.long()
        position_NS = attended.cumsum(1) - 1
    return ids_NS * PHASES + position_NS.clamp(min=0) % PHASES


def table(*, vocabulary: int = VOCABULARY, varying: bool = False) -> Tensor:
    """Logits by (token, phase). The pad token's rows are uniform: padding that counts is seen."""
    table_RV = torch.full((LIVE * PHASES, vocabulary), DEAD)
    for token in range(LIVE):
        for phase in range(PHASES):
            level = list(_LEVELS[_LEVEL_OF_TOKEN[token]])
            if varying:
                # Sharp after the tokens that end a prompt, flat after those that end a response:
                # over a response, the sums with and without a shift differ by just these two.
                sharpness = phase + (6 if token in (1, 4, 6) else 1)
                turn = (3 * token + phase) % LIVE
                level = [sharpness * x // 2 for x in (level[turn:] + level[:turn])]
            table_RV[token * PHASES + phase, :LIVE] = torch.tensor(level) / 8
    table_RV[PAD * PHASES : (PAD + 1) * PHASES] = 0.0
    return table_RV


def flat_tail(vocabulary: int) -> Tensor:
    """Rows in which the tail of the vocabulary holds about half of the probability."""
    table_RV = table(vocabulary=vocabulary)
    count = vocabulary - LIVE
    tail_V = torch.arange(count) % 9 / 8 - round(math.log(count) * 8) / 8 + 2.0
    table_RV[PHASES:, LIVE:] = tail_V + table_RV[PHASES:, 1:5].max(1, keepdim=True).values - 2.0
    return table_RV


def far_apart(vocabulary: int) -> Tensor:
    """Likely tokens at both ends and in the middle of the vocabulary, and next to none between."""
    table_RV = table(vocabulary=vocabulary)
    top_R1 = table_RV[:, :LIVE].max(1, keepdim=True).values
    table_RV[:, [vocabulary // 2 + 1, vocabulary - 1]] = top_R1
    return table_RV


def wide_range() -> Tensor:
    """Logits of 20 to 40 with all the digits of fp32: bf16 holds them to within 1/8."""
    table_RV = table()
    level_R1 = torch.tensor(_LEVEL_OF_TOKEN).repeat_interleave(PHASES)[:, None]
    column_V = torch.arange(LIVE)
    table_RV[:, :LIVE] += 33.1 + 0.0713 * ((3 * column_V + level_R1) % LIVE)
    return table_RV


def batch(
    label: str,
    table_RV: Tensor,
    *,
    side: str = "left",
    lengths: Sequence[int] = (RESPONSE,) * 3,
    prompts: str = "equal",
    **options: Any,
) -> Scene:
    """The three sequences, with prompts of `equal` length, of their `own`, or `filling`.

    With filling prompts all sequences are equally long without any padding.
    """
    sequences = []
    for (prompt, response), length in zip(_TALKS, lengths, strict=True):
        missing = {"equal": 3 - len(prompt), "own": 0}.get(prompts, 7 - length - len(prompt))
        prompt = (PROMPT,) * missing + prompt
        sequences.append((prompt, response[:length]))
    width = max(len(p) + len(r) for p, r in sequences)
    ids, attention, response_mask = [], [], []
    for prompt, response in sequences:
        # A response shorter than the others is padded on the right, as trainers do.
        short = side == "left" and prompts != "filling"
        after = max(lengths) - len(response) if short else 0
        before = width - len(prompt) - len(response) - after if side == "left" else 0
        after = width - before - len(prompt) - len(response)
        real = len(prompt) + len(response)
        ids.append([PAD] * before + [*prompt, *response] + [PAD] * after)
        attention.append([0] * before + [1] * real + [0] * after)
        blank = [0] * (before + len(prompt))
        response_mask.append(blank + [1] * len(response) + [0] * after)
    return Scene(
        label=label,
        table_RV=table_RV,
        ids_NS=torch.tensor(ids),
        attention_NS=torch.tensor(attention).bool(),
        response_NS=torch.tensor(response_mask).bool(),
        **options,
    )


def uneven() -> Scene:
    return batch("responses of 4, 2 and 1 tokens", table(), lengths=(4, 2, 1))


def sharded() -> Scene:
    """Two ranks: one has 8 tokens of the sharp sequence, the other 3 of the flat ones."""
    whole = uneven()
    return replace(
        whole.pick((0, 0, 1, 2)),
        label="two ranks with 8 and 3 tokens",
        shards=(whole.pick((0, 0)), whole.pick((1, 2))),
    )


class _Output(dict[str, Any]):
    """`.logits`, `["logits"]` and `[0]`, as a transformers output."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        return next(iter(self.values())) if key == 0 else super().__getitem__(key)


class _Backbone(nn.Module):
    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rows, self.dtype = rows, dtype

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **_: Any,
    ) -> _Output:
        rows_NS = rows_of(input_ids, attention_mask, position_ids)
        hidden = nn.functional.one_hot(rows_NS, self.rows).to(self.dtype)
        return _Output(last_hidden_state=hidden)


class GoldenModel(nn.Module):
    """A scene's table as a causal language model, called as those of transformers are.

    The hidden state is one-hot, so the LM head returns rows of the table exactly. Positions are
    counted over attended tokens: a caller who forgets the attention mask gets other rows.
    """

    def __init__(self, scene: Scene) -> None:
        super().__init__()
        rows, vocabulary = scene.table_RV.shape
        dtype = scene.table_RV.dtype
        self.model = _Backbone(rows, dtype)
        self.lm_head = nn.Linear(rows, vocabulary, bias=False, dtype=dtype)
        self.lm_head.weight.data = scene.table_RV.T.contiguous()
        text = SimpleNamespace(model_type="golden", vocab_size=vocabulary)
        self.config = SimpleNamespace(get_text_config=lambda: text, vocab_size=vocabulary)

    @property
    def base_model(self) -> nn.Module:
        return self.model

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> _Output:
        hidden = self.model(input_ids, attention_mask, position_ids)["last_hidden_state"]
        return _Output(
            logits=self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        )
