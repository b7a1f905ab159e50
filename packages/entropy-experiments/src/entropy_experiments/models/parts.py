"""The decoder and the head of a causal LM, and what a few tokens show of it.

Whether logits are `head(hidden)`, whether rollouts may share a row: a model is asked by
trial, once, on tokens that cost nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from entropy_experiments.models.calling import causal_lm
from entropy_experiments.types import Rollouts

FEW = 5
FAILURES = (TypeError, ValueError, RuntimeError, LookupError, AttributeError)
"""What a trial may end with in a model that is not made for it."""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Relative to the largest number; half precision, where head and model may differ in rounding,
gets HALF_TOLERANCE. A soft cap or a scaling is wrong by far more than either."""
HALF_TOLERANCE = 0.03


class Parts(NamedTuple):
    """Of a model whose head is a plain nn.Linear."""

    decoder: nn.Module
    prefix: str
    """What the names of the decoder's parameters begin with."""
    head: nn.Linear
    weight: str
    """The name of the head's weight: the embedding's, where they are tied."""
    bias: str | None


def find_parts(model: nn.Module) -> Parts | None:
    """None: there is no plain head."""
    lm = causal_lm(model)
    head, decoder = lm.get_output_embeddings(), getattr(lm, lm.base_model_prefix, None)
    # Exactly nn.Linear: a LoRA layer or a quantised one is a subclass with another forward.
    if type(head) is not nn.Linear or decoder is None or decoder is lm:
        return None
    prefix = next((name for name, module in model.named_modules() if module is decoder), None)
    names = {id(value): name for name, value in model.named_parameters()}
    if prefix is None or id(head.weight) not in names:
        return None
    bias = None if head.bias is None else names[id(head.bias)]
    return Parts(decoder, f"{prefix}.", head, names[id(head.weight)], bias)


def few_tokens(model: nn.Module) -> Tensor:
    embeddings = causal_lm(model).get_input_embeddings().weight
    tokens_S = torch.arange(FEW, device=embeddings.device) % len(embeddings)
    return tokens_S[None]


def passing_tokens(model: nn.Module) -> Tensor:
    """Four rollouts of 64 tokens: what a pass takes shows in them."""
    return few_tokens(model).repeat(1, -(-64 // FEW))[:, :64].repeat(4, 1)


def two_of_one_prompt(model: nn.Module) -> Rollouts:
    """Three tokens that two responses of two tokens share."""
    vocabulary = len(causal_lm(model).get_input_embeddings().weight)
    response_NS = torch.arange(5).expand(2, 5) >= 3
    return Rollouts(
        tokens_NS=torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]) % vocabulary,
        attention_NS=torch.ones_like(response_NS),
        response_NS=response_NS,
        prompt_N=torch.zeros(2, dtype=torch.int64),
    )


def alike(got: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """The same but for rounding, both having been made in this precision."""
    if got.shape != expected.shape:
        return False
    got, expected = got.to(expected.device).double(), expected.double()
    tolerance = TOLERANCE.get(dtype, HALF_TOLERANCE)
    return bool((got - expected).abs().max() <= tolerance * expected.abs().max())
