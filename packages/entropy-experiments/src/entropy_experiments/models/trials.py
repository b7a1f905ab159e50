"""What is tried on a few tokens before a model's scores are relied upon.

Whether the logits are `head(hidden)` (`Parts`), whether rollouts may share a row, and whether the
scores are the model's own.

A model's own call on one sequence, tokens and nothing else, is what scores mean. Scoring passes
positions, a mask and padded batches; the trial is a sequence alone, and a batch of it with its own
beginning, padded on the right:

    the beginning alone has the logits that it has in the whole         else: not causal
    the batch has the logits of both alone                              else: other positions

A model that fails is refused, with its name and the reason; numbers that are silently another
model's are the worst that can happen here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from entropy_experiments.models.call_conditions import (
    causal_lm,
    eval_mode,
    forward_as,
    plain_inputs,
)
from entropy_experiments.numerics.derivatives import no_autocast
from entropy_experiments.types import Rollouts

FEW = 5
FAILURES = (TypeError, ValueError, RuntimeError, LookupError, AttributeError)
"""What a trial may end with in a model that is not made for it."""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Relative to the largest number; half precision, where head and model may differ in rounding,
gets HALF_TOLERANCE. A soft cap or a scaling is wrong by far more than either."""
HALF_TOLERANCE = 0.03
WHOLE, BEGINNING = 12, 8
"""Tokens of the trial's two sequences."""
STRAY = 0.25
"""Share of positions that may differ in half precision: rounding sends a token to another expert
now and then, while wrong positions are wrong everywhere."""
HIGH = 1000.0
"""Logits to try a head at: a soft cap (30 or 50, say) cannot be seen in small ones."""


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


def nearly_equal(got: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """The same but for rounding, both having been made in this precision."""
    if got.shape != expected.shape:
        return False
    got, expected = got.to(expected.device).double(), expected.double()
    tolerance = TOLERANCE.get(dtype, HALF_TOLERANCE)
    return bool((got - expected).abs().max() <= tolerance * expected.abs().max())


class UnsupportedModelError(ValueError):
    """A model whose scores would not be its own."""


class Trial(NamedTuple):
    """A sequence, and the model's own logits for it and for its beginning."""

    tokens_1S: Tensor
    whole_SV: Tensor
    beginning_SV: Tensor

    @property
    def padded_NS(self) -> Tensor:
        """The sequence and its beginning as one batch, and a last token from which none looks."""
        beginning_1S = self.tokens_1S.clone()
        beginning_1S[:, BEGINNING:] = 0
        return nn.functional.pad(torch.cat([self.tokens_1S, beginning_1S]), (0, 1))


def name_of(model: nn.Module) -> str:
    lm = causal_lm(model)
    return f"{type(lm).__name__} (model_type {lm.config.model_type!r})"


def own_trial(model: nn.Module) -> Trial:
    """The model's own calls; refused: a model that cannot be called so, or is not causal."""
    tokens_1S = trial_tokens(model)
    whole, beginning = (_own_call(model, x) for x in (tokens_1S, tokens_1S[:, :BEGINNING]))
    for length, logits in ((WHOLE, whole), (BEGINNING, beginning)):
        if logits.dim() != 3 or logits.shape[:2] != (1, length):
            raise UnsupportedModelError(
                f"{name_of(model)} gave logits of shape {tuple(logits.shape)} for {length} tokens; "
                f"expected (1, {length}, vocabulary): one distribution after each token."
            )
        if not bool(torch.isfinite(logits).all()):
            raise UnsupportedModelError(
                f"{name_of(model)} gave logits that are not finite for {length} ordinary tokens. "
                "Check the checkpoint's weights, or set checkpoint.dtype to float32."
            )
    trial = Trial(tokens_1S, whole[0], beginning[0])
    gap = difference(trial.whole_SV[:BEGINNING], trial.beginning_SV)
    if gap > 0 and difference(_own_call(model, tokens_1S)[0], trial.whole_SV) > 0:
        raise UnsupportedModelError(
            f"{name_of(model)} gives two answers for the same tokens; expected the same twice. Is "
            "a dropout on that eval() does not turn off, or are its hashes drawn anew?"
        )
    if gap > 0:
        raise UnsupportedModelError(
            f"{name_of(model)} is not causal: what comes later changed earlier logits by {gap:.2g}."
            f"{_why_not_causal(model)} Expected logits that depend on earlier tokens alone."
        )
    return trial


def _own_call(model: nn.Module, tokens_1S: Tensor) -> Tensor:
    try:
        with torch.no_grad(), no_autocast(), eval_mode(model), plain_inputs(model):
            return model(input_ids=tokens_1S).logits
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        raise UnsupportedModelError(
            f"{name_of(model)} cannot be called with input_ids alone: {first_line(error)} Expected "
            "a causal LM over one sequence of tokens. Encoders, codebooks and draft models have no "
            "entropy of their own here."
        ) from error


def _why_not_causal(model: nn.Module) -> str:
    config = causal_lm(model).config
    for name in ("is_decoder", "causal"):
        if getattr(config, name, None) is False:
            return f" Its config has {name}=False: load it with {name}=True, if it is a decoder."
    return ""


def trial_tokens(model: nn.Module) -> Tensor:
    """Ordinary tokens, none of them special to this model (padding, an image's place)."""
    lm = causal_lm(model)
    embeddings = lm.get_input_embeddings().weight
    special = set()
    for key, value in lm.config.to_dict().items():
        if key.endswith("_token_id"):  # some have several
            special.update(value if isinstance(value, list | tuple) else (value,))
    ordinary = [token for token in range(min(len(embeddings), 1000)) if token not in special] or [0]
    draw = torch.Generator().manual_seed(0)
    picked_S = torch.randint(len(ordinary), (WHOLE,), generator=draw)
    return torch.tensor([[ordinary[int(i)] for i in picked_S]], device=embeddings.device)


def difference(got_SV: Tensor, expected_SV: Tensor) -> float:
    """How far logits are apart, in nats; 0 where it is rounding."""
    if got_SV.shape != expected_SV.shape:
        return torch.inf
    tolerance = TOLERANCE.get(expected_SV.dtype, HALF_TOLERANCE)
    got_SV, expected_SV = got_SV.to(expected_SV.device).double(), expected_SV.double()
    gap_S = (got_SV - expected_SV).abs().amax(-1)
    # NaN is not within any tolerance.
    stray = float((~(gap_S <= tolerance * expected_SV.abs().max())).double().mean())
    allowed = STRAY if tolerance == HALF_TOLERANCE else 0.0
    gap = float(gap_S.max())
    return 0.0 if stray <= allowed else gap if gap == gap else torch.inf


def accepted_arguments(module: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
    """Of these arguments the ones that this forward takes: not every model counts positions."""
    parameters = inspect.signature(type(causal_lm(module)).forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return named
    return {name: value for name, value in named.items() if name in parameters}


@contextmanager
def scaled_states(decoder: nn.Module, factor: float) -> Iterator[None]:
    """Inside, the decoder hands on its states times this factor."""
    own_forward = decoder.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = own_forward(*args, **kwargs)
        if isinstance(output, tuple):
            return (output[0] * factor, *output[1:])
        output[next(iter(output))] = output[0] * factor
        return output

    with forward_as(decoder, forward) if factor != 1 else nullcontext():
        yield


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    line = text.splitlines()[0] if text else "no message"
    return f"{type(error).__name__}: {line.rstrip('.')}."
