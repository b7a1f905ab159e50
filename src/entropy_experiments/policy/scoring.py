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
from itertools import pairwise
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
    nothing_differentiated,
    plain_inputs,
    quickest_attention,
    recomputed,
    records_a_graph,
    trains_padded_embeddings,
)
from entropy_experiments.policy.lora import (
    fused_adapters,
    may_stack,
    plain_lora_layers,
    stacked_adapters,
)
from entropy_experiments.policy.lower_layers import Below, lower_layers
from entropy_experiments.policy.packed import Packed
from entropy_experiments.policy.parts import alike, few_tokens, find_parts, two_of_one_prompt
from entropy_experiments.policy.shared_prompts import Rows, may_share, shared_rows
from entropy_experiments.types import Params, Rollouts, Scores, check_params

STACKED_TOKENS = 1024
"""Tokens in one pass up to which several settings share it."""
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
        self._parts = find_parts(model)
        if self._parts is not None and not self._head_makes_the_logits():
            self._parts = None
        self._shares = self._sharing_changes_nothing()
        self._lower = lower_layers(model, self._names)
        if self._lower and not self._keeping_changes_nothing():
            self._lower = ()

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
        tokens_NS = few_tokens(self.model)
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
        """The same rollouts under several parameter settings, packed once.

        Where only adapters are trained and nothing is differentiated, settings of few tokens go
        through the model together (`lora.stacked_adapters`). Layers below all that is trained are
        computed once. Neither changes a number.
        """
        packed, below, found = self._packed(rollouts), Below(self._lower), []
        size = self._stack_size(packed) if len(many) > 1 else 1
        # With layers to keep, the first setting goes alone: it gives the others their states.
        starts = [0, *range(1 if self._lower else size, len(many), size)]
        for group in (many[i:j] for i, j in pairwise([*starts, len(many)]) if i < j):
            with below.once(len(group)):
                found += self._score_stack(group, packed)
        return [Scores(*map(packed.back, scores)) for scores in found]

    @property
    def stacks(self) -> bool:
        """Whether `score_many` can have several settings in one pass, as things stand."""
        if self._parts is None:
            return False
        with evaluating(self.model):  # a dropout that is off does not stand in the way
            return may_stack(self._adapters, self._names)

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

    def _stack_size(self, packed: Packed) -> int:
        """How many settings of these rows to have in one pass."""
        tokens = packed.rows.tokens_RS if packed.rows else packed.rollouts.tokens_NS
        if not nothing_differentiated() or not self.stacks:
            return 1
        return max(1, STACKED_TOKENS // tokens.numel())

    def _score_stack(self, many: Sequence[Params], packed: Packed) -> list[Scores]:
        """One pass for all of them; of one setting, the ordinary one."""
        if len(many) == 1:
            return [self._score(many[0], packed)]
        for params in many:
            check_params("params", params, self.params)
        assert self._parts is not None  # then the head is not trained: adapters are all that is
        decoder, _, head = self._parts[:3]
        rollouts, stacked = packed.rollouts, len(many)
        with stacked_adapters(self._adapters, many):
            found = self._call(decoder, {}, rollouts.tokens_NS, packed.rows, stacked=stacked)[0]
        # One setting after the other: all at once, the head's products round differently.
        return [
            response_scores(
                hidden_RSD.to(head.weight.device),
                head.weight,
                rollouts,
                place=packed.place,
                bias_V=head.bias,
                **self._settings,
            )
            for hidden_RSD in found.chunk(stacked)
        ]

    @property
    def _settings(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "top_p": self.top_p, "chunk": self.chunk}

    def _score(self, params: Params, packed: Packed) -> Scores:
        check_params("params", params, self.params)
        rollouts = packed.rollouts
        if self._parts is not None:
            hidden_RSD, head_VD, bias_V = self._hidden(params, rollouts.tokens_NS, packed.rows)
            place = {"place": packed.place, "bias_V": bias_V}
            return response_scores(hidden_RSD, head_VD, rollouts, **place, **self._settings)
        where, logits_TV = self._response_logits(params, packed)
        logprob_T, entropy_T = token_scores(logits_TV, rollouts.tokens_NS[where], **self._settings)
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
        self,
        module: nn.Module,
        params: Params,
        tokens_NS: Tensor,
        rows: Rows | None = None,
        *,
        stacked: int = 1,
    ) -> Any:
        """With `stacked`, the rows that many times over, one block after another."""
        attention: AbstractContextManager[Any] = nullcontext()
        if rows is None:
            tokens_NS = tokens_NS[:, :-1]  # the last is drawn and never looked from
            position_S = torch.arange(tokens_NS.shape[1], device=tokens_NS.device)
            # All ones, though there is padding: it comes after all that is looked at. Without a
            # mask some architectures warn, and others guess packed sequences from positions.
            inputs = (tokens_NS, position_S.expand(tokens_NS.shape), torch.ones_like(tokens_NS))
            inputs = tuple(x_NS.repeat(stacked, 1) for x_NS in inputs)
        else:
            attention, mask_R1SS = self._looking(rows, stacked)
            tokens_RS, position_RS = rows.tokens_RS, rows.position_RS
            inputs = (tokens_RS.repeat(stacked, 1), position_RS.repeat(stacked, 1), mask_R1SS)
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

    def _looking(self, rows: Rows, stacked: int) -> tuple[AbstractContextManager[Any], Tensor]:
        """How attention is to be computed, and the mask that the model gets."""
        if self._attention == "sdpa":
            if records_a_graph():
                # As a trainer does it: by segments a rebuilt step was three times as far from
                # TRL's own (7.5e-6 instead of 2.6e-6 of its size, a tiny adapter in fp32).
                return nullcontext(), rows.looks_R1SS
            by_segments = rows.by_segments(stacked)
            return by_segments, by_segments.mask
        dtype = causal_lm(self.model).get_input_embeddings().weight.dtype
        lowest = torch.finfo(dtype).min  # eager attention adds its mask
        mask_R1SS = torch.zeros_like(rows.looks_R1SS, dtype=dtype)
        mask_R1SS = mask_R1SS.masked_fill(~rows.looks_R1SS, lowest)
        return nullcontext(), mask_R1SS.repeat(stacked, 1, 1, 1)

    @property
    def _attention(self) -> str:
        return getattr(causal_lm(self.model).config, "_attn_implementation", "")

    def _sharing_changes_nothing(self) -> bool:
        """Two responses to one prompt, together and apart: the same states."""
        if not may_share(causal_lm(self.model).config) or self._attention not in KNOWN_MASKS:
            return False
        packed = Packed.of(two_of_one_prompt(self.model), self.device)
        tokens_NS, rows = packed.rollouts.tokens_NS, shared_rows(packed.rollouts)
        assert rows is not None  # seven tokens in place of ten
        with torch.no_grad():
            apart_NSX = self._states(self.params, tokens_NS)
            try:
                together_RSX = self._states(self.params, tokens_NS, rows)
            except torch.OutOfMemoryError:
                raise
            except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
                return False  # an architecture that makes its own mask from a flat one
        row_NS, column_NS = (x_NS[:, :-1].to(together_RSX.device) for x_NS in rows.place)
        return alike(apart_NSX, together_RSX[row_NS, column_NS], apart_NSX.dtype)

    def _head_makes_the_logits(self) -> bool:
        tokens_NS = few_tokens(self.model)
        with torch.no_grad():
            hidden_NSD, head_VD, bias_V = self._hidden(self.params, tokens_NS)
            made_NSV = nn.functional.linear(hidden_NSD.to(head_VD.dtype), head_VD, bias_V)
            own_NSV = self._call(self.model, self.params, tokens_NS)[0]
        return alike(made_NSV, own_NSV, hidden_NSD.dtype)

    def _keeping_changes_nothing(self) -> bool:
        """Other parameters on states that the lower layers gave before: the same numbers."""
        tokens_NS, below = few_tokens(self.model), Below(self._lower)
        moved = {name: value + 0.01 for name, value in self.params.items()}
        with torch.no_grad():
            expected_NSX = self._states(moved, tokens_NS)
            with below.once():
                self._states(self.params, tokens_NS)
            with below.once():
                found_NSX = self._states(moved, tokens_NS)
        return torch.equal(found_NSX, expected_NSX)
