"""Teacher forcing of a transformers causal LM, as a function of its trainable parameters.

Rollouts are moved to the left edge first, so that all padding is on the right. A causal model then
never looks at padding, needs no mask, and gives every rollout the positions 0, 1, 2, ...: a batch
gives the numbers of one rollout at a time. Rollouts of one prompt share a row (`shared_prompts`),
where the model allows it. The scores come back where the tokens were.

Attention that is differentiated runs through torch's MATH kernel: fused kernels have neither
forward mode nor a double backward. Shared rows go by `segments`, except where an ordinary graph is
recorded. Eager attention casts its softmax to fp32, which ends fp64.

The decoder's hidden states meet the LM head at response positions only, inside `response_scores`.
That is right where logits are `head(hidden)` and nothing else; where they are not (an adapter on
the head, Gemma's soft cap, Granite's scaling; found out once, at construction) the model makes its
own logits for the whole microbatch.

The model is never changed: parameters travel through `functional_call`, and training mode, which
is off during a call, is put back module by module.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from entropy_experiments.numerics.entropy import (
    before_response,
    nucleus_fingerprint,
    response_scores,
    response_support,
    token_scores,
)
from entropy_experiments.numerics.forward_mode import frozen_weights
from entropy_experiments.policy.by_rollout import gradients_by_rollout
from entropy_experiments.policy.calling import (
    PaddingRows,
    causal_lm,
    checkpointable_layers,
    differentiated_fully,
    dora_layers,
    evaluating,
    plain_inputs,
    quickest_attention,
    recomputed,
    records_a_graph,
    trains_padded_embeddings,
)
from entropy_experiments.policy.lora import fused_adapters, plain_lora_layers
from entropy_experiments.policy.packed import Packed
from entropy_experiments.policy.shared_prompts import Rows, may_share, shared_rows
from entropy_experiments.types import Params, Rollouts, Scores, check_params

SELF_CHECK_TOKENS = 5
SELF_CHECK_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Relative to the largest logit; half precision, where head and model may differ in rounding,
gets HALF_TOLERANCE. A soft cap or a scaling is wrong by far more than either."""
HALF_TOLERANCE = 0.03
KNOWN_MASKS = ("sdpa", "eager")
"""Implementations of attention that take a square mask."""


class SequenceProcessor:
    """A loaded model as the estimators see it (`types.Policy`, and `types.NucleusPolicy`)."""

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        chunk: int | None = None,
        checkpointing: bool = False,
        training_gradient: bool = False,
    ) -> None:
        if not temperature > 0:
            raise ValueError(
                f"temperature is {temperature}; expected above 0. Greedy decoding has no entropy."
            )
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}; expected in (0, 1].")
        self.model = model
        self.temperature, self.top_p, self.chunk = float(temperature), float(top_p), chunk
        self.checkpointing = checkpointing
        self._names = tuple(n for n, p in model.named_parameters() if p.requires_grad)
        if not self._names:
            raise ValueError(
                f"{type(model).__name__} has no trainable parameters; expected at least one with "
                "requires_grad. An update can only move those: load an adapter with "
                "is_trainable=True, or call requires_grad_() on what training moves."
            )
        self._layers = checkpointable_layers(model) if checkpointing else ()
        self._dora = () if training_gradient else dora_layers(model)
        self._adapters = plain_lora_layers(model)
        self._padded, self._as_trained = trains_padded_embeddings(model), training_gradient
        self._parts = _find_parts(model)
        if self._parts is not None and not self._head_makes_the_logits():
            self._parts = None
        self._shares = self._sharing_changes_nothing()

    @property
    def params(self) -> dict[str, Tensor]:
        """The trainable parameters by name, detached but sharing the model's memory."""
        mine = dict(self.model.named_parameters())
        return {name: mine[name].detach() for name in self._names}

    def as_trained(self) -> SequenceProcessor:
        """The same scores with the gradient that *training* takes of them.

        They differ for DoRA, which trains as if its norms were constants, and in the embedding of
        a padding token, which is not trained. Use this one for the gradient of a training loss,
        and the other for the slope of an entropy.
        """
        if not self._dora and not self._padded:
            return self
        other = copy(self)
        other._dora, other._as_trained = (), True
        return other

    @property
    def logits_path(self) -> str:
        """Where logits come from: "head" (at response positions only) or "model" (all of them)."""
        return "model" if self._parts is None else "head"

    @property
    def shares_prompts(self) -> bool:
        """Whether rollouts of one prompt go through the model together."""
        return self._shares

    @property
    def repeatable(self) -> bool:
        """Whether a few tokens get the same states twice: no dropout, or none that stays on."""
        tokens_NS = _few_tokens(self.model)
        with torch.no_grad():
            once_NSX, again_NSX = (self._states(self.params, tokens_NS) for _ in range(2))
        return torch.equal(once_NSX, again_NSX)

    def without_sharing(self) -> SequenceProcessor:
        """The same scores with every rollout in a row of its own."""
        other = copy(self)
        other._shares = False
        return other

    def score(self, params: Params, rollouts: Rollouts) -> Scores:
        (scores,) = self.score_many([params], rollouts)
        return scores

    def score_many(self, many: Sequence[Params], rollouts: Rollouts) -> list[Scores]:
        """The same rollouts under several parameter settings, packed once."""
        packed = self._packed(rollouts)
        return [
            Scores(*(packed.back(x_NS) for x_NS in self._score(params, packed))) for params in many
        ]

    def gradients_by_rollout(
        self, params: Params, rollouts: Rollouts, worths: Sequence[Scores]
    ) -> list[dict[str, Tensor]]:
        """For each worth the gradients [n, *shape] of sum(worth_l l + worth_h h) by rollout."""
        # In a row of their own: what the layers see of a shared prompt belongs to all of them.
        alone = self.without_sharing().score
        return gradients_by_rollout(alone, self.model, params, rollouts, worths)

    def score_all(
        self, rollouts: Rollouts, *, microbatch: int = 8, params: Params | None = None
    ) -> Scores:
        """Any number of rollouts, length-sorted microbatches at a time, without gradients."""
        params = self.params if params is None else params
        whole: list[Tensor] | None = None
        with torch.no_grad():
            for rows_N, columns, part in rollouts.split(microbatch, self):
                scores = self.score(params, part)
                if whole is None:
                    whole = [x_NS.new_zeros(rollouts.tokens_NS.shape) for x_NS in scores]
                for all_NS, x_NS in zip(whole, scores, strict=True):
                    all_NS[rows_N.to(all_NS.device), columns] = x_NS
        assert whole is not None  # rollouts are never empty
        return Scores(*whole)

    def support(self, params: Params, rollouts: Rollouts) -> Tensor:
        packed = self._packed(rollouts)
        inside, settings = packed.rollouts, {"temperature": self.temperature, "top_p": self.top_p}
        if self._parts is None:
            where, logits_TV = self._response_logits(params, packed)
            found_NS = torch.zeros_like(inside.tokens_NS).index_put(
                where, nucleus_fingerprint(logits_TV, **settings)
            )
        else:
            hidden_RSD, head_VD, bias_V = self._hidden(params, inside.tokens_NS, packed.rows)
            found_NS = response_support(
                hidden_RSD, head_VD, inside, place=packed.place, bias_V=bias_V, **settings
            )
        return packed.back(found_NS)

    def _packed(self, rollouts: Rollouts) -> Packed:
        packed = Packed.of(rollouts, self.device)
        if not self._shares:
            return packed
        widest = getattr(causal_lm(self.model).config, "max_position_embeddings", None)
        square = self._attention != "sdpa" or records_a_graph()
        return replace(packed, rows=shared_rows(packed.rollouts, widest, square=square))

    @property
    def device(self) -> torch.device:
        """Where tokens go in: the device of the input embeddings."""
        return causal_lm(self.model).get_input_embeddings().weight.device

    def _score(self, params: Params, packed: Packed) -> Scores:
        check_params("params", params, self.params)
        rollouts = packed.rollouts
        settings = {"temperature": self.temperature, "top_p": self.top_p, "chunk": self.chunk}
        if self._parts is not None:
            hidden_RSD, head_VD, bias_V = self._hidden(params, rollouts.tokens_NS, packed.rows)
            settings |= {"place": packed.place, "bias_V": bias_V}
            return response_scores(hidden_RSD, head_VD, rollouts, **settings)
        where, logits_TV = self._response_logits(params, packed)
        logprob_T, entropy_T = token_scores(logits_TV, rollouts.tokens_NS[where], **settings)
        empty_NS = logprob_T.new_zeros(rollouts.tokens_NS.shape)
        return Scores(empty_NS.index_put(where, logprob_T), empty_NS.index_put(where, entropy_T))

    def _hidden(
        self, params: Params, tokens_NS: Tensor, rows: Rows | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        assert self._parts is not None
        _, _, head, weight, bias = self._parts
        hidden_NSD = self._states(params, tokens_NS, rows)
        # A tied head is the embedding's parameter under its first name.
        head_VD = params.get(weight, head.weight)
        bias_V = params.get(bias, head.bias) if bias is not None else None
        return hidden_NSD.to(head_VD.device), head_VD, bias_V

    def _states(self, params: Params, tokens_NS: Tensor, rows: Rows | None = None) -> Tensor:
        """What the decoder gives; where the head is not ours to apply, the model's logits."""
        if self._parts is None:
            return self._call(self.model, params, tokens_NS, rows)[0]
        decoder, prefix = self._parts[:2]
        inside = {
            name.removeprefix(prefix): value
            for name, value in params.items()
            if name.startswith(prefix)
        }
        return self._call(decoder, inside, tokens_NS, rows)[0]

    def _response_logits(
        self, params: Params, packed: Packed
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        logits_RSV = self._states(params, packed.rollouts.tokens_NS, packed.rows)
        return before_response(logits_RSV, packed.rollouts, packed.place)

    def _call(
        self, module: nn.Module, params: Params, tokens_NS: Tensor, rows: Rows | None = None
    ) -> Any:
        attention: AbstractContextManager[Any] = nullcontext()
        if rows is None:
            tokens_NS = tokens_NS[:, :-1]  # the last is drawn and never looked from
            position_S = torch.arange(tokens_NS.shape[1], device=tokens_NS.device)
            # All ones, though there is padding: it comes after all that is looked at. Without a
            # mask some architectures warn, and others guess packed sequences from positions.
            inputs = (tokens_NS, position_S.expand(tokens_NS.shape), torch.ones_like(tokens_NS))
        else:
            attention, mask_R1SS = self._looking(rows)
            inputs = (rows.tokens_RS, rows.position_RS, mask_R1SS)
        named = dict(zip(("input_ids", "position_ids", "attention_mask"), inputs, strict=True))
        # Recomputation happens in backward.
        recompute = self._layers if records_a_graph() else ()
        with (
            evaluating(self.model),
            plain_inputs(self.model),
            quickest_attention(),
            differentiated_fully(self._dora),
            fused_adapters(self._adapters),
            PaddingRows(frozen=self._as_trained) if self._padded else nullcontext(),
            attention,
            recomputed(recompute, self._dora),
            frozen_weights(),
        ):
            return functional_call(module, dict(params), (), {**named, "use_cache": False})

    def _looking(self, rows: Rows) -> tuple[AbstractContextManager[Any], Tensor]:
        """How attention is to be computed, and the mask that the model gets."""
        if self._attention == "sdpa":
            if records_a_graph():
                # As a trainer does it: by segments a rebuilt step was three times as far from
                # TRL's own (7.5e-6 instead of 2.6e-6 of its size, a tiny adapter in fp32).
                return nullcontext(), rows.looks_R1SS
            by_segments = rows.by_segments()
            return by_segments, by_segments.mask
        dtype = causal_lm(self.model).get_input_embeddings().weight.dtype
        lowest = torch.finfo(dtype).min  # eager attention adds its mask
        mask_R1SS = torch.zeros_like(rows.looks_R1SS, dtype=dtype)
        return nullcontext(), mask_R1SS.masked_fill(~rows.looks_R1SS, lowest)

    @property
    def _attention(self) -> str:
        return getattr(causal_lm(self.model).config, "_attn_implementation", "")

    def _sharing_changes_nothing(self) -> bool:
        """Two responses to one prompt, together and apart: the same states."""
        if not may_share(causal_lm(self.model).config) or self._attention not in KNOWN_MASKS:
            return False
        embeddings = causal_lm(self.model).get_input_embeddings().weight
        tokens_NS = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 5, 6]]) % len(embeddings)
        response_NS = torch.arange(5).expand(2, 5) >= 3
        rollouts = Rollouts(
            tokens_NS=tokens_NS,
            attention_NS=torch.ones_like(response_NS),
            response_NS=response_NS,
            prompt_N=torch.zeros(2, dtype=torch.int64),
        )
        packed = Packed.of(rollouts, self.device)
        rows = shared_rows(packed.rollouts)
        assert rows is not None  # five tokens in place of eight
        with torch.no_grad():
            apart_NSX = self._states(self.params, packed.rollouts.tokens_NS)
            try:
                together_RSX = self._states(self.params, tokens_NS, rows)
            except torch.OutOfMemoryError:
                raise
            except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
                return False  # an architecture that makes its own mask from a flat one
        row_NS, column_NS = (x_NS[:, :-1].to(together_RSX.device) for x_NS in rows.place)
        gap = (together_RSX[row_NS, column_NS] - apart_NSX).abs().max()
        tolerance = SELF_CHECK_TOLERANCE.get(apart_NSX.dtype, HALF_TOLERANCE)
        return bool(gap <= tolerance * apart_NSX.abs().max())

    def _head_makes_the_logits(self) -> bool:
        tokens_NS = _few_tokens(self.model)
        with torch.no_grad():
            hidden_NSD, head_VD, bias_V = self._hidden(self.params, tokens_NS)
            made_NSV = nn.functional.linear(hidden_NSD.to(head_VD.dtype), head_VD, bias_V).double()
            own_NSV = self._call(self.model, self.params, tokens_NS)[0].double()
        tolerance = SELF_CHECK_TOLERANCE.get(hidden_NSD.dtype, HALF_TOLERANCE)
        if made_NSV.shape != own_NSV.shape:
            return False
        error = (made_NSV - own_NSV.to(made_NSV.device)).abs().max()
        return bool(error <= tolerance * made_NSV.abs().max())


def _few_tokens(model: nn.Module) -> Tensor:
    embeddings = causal_lm(model).get_input_embeddings().weight
    tokens_S = torch.arange(SELF_CHECK_TOKENS, device=embeddings.device) % len(embeddings)
    return tokens_S[None]


def _find_parts(model: nn.Module) -> tuple[nn.Module, str, Any, str, str | None] | None:
    """(decoder, its prefix, head, name of the head's weight, of its bias); None: no plain head."""
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
    return decoder, f"{prefix}.", head, names[id(head.weight)], bias
