"""A transformers causal LM as a function of its trainable parameters: tokens in, states out.

All padding is on the right. A causal model then never looks at it, needs no mask, and every rollout
has the positions that it has alone (`positions`). Rollouts of one prompt may share a row
(`shared_prompts`). That the model's own call gives the same is tried at construction (`trials`).

Attention that is differentiated runs through torch's MATH kernel: fused kernels have neither
forward mode nor a double backward. Shared rows go by segments, except where an ordinary graph is
recorded. Eager attention casts its softmax to fp32, which ends fp64.

The model is never changed: parameters travel through `call_with`, and training mode, which
is off during a call, is put back module by module.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from entropy_experiments.models.call_conditions import (
    GradientsKept,
    PaddingRows,
    call_with,
    causal_lm,
    checkpointable_layers,
    differentiate_dora_fully,
    dora_layers,
    eval_mode,
    expert_configs,
    fastest_attention,
    layers_without_gradients,
    plain_experts,
    plain_inputs,
    recompute_layers,
    records_a_graph,
    trains_padded_embeddings,
)
from entropy_experiments.models.lora import fused_adapters, plain_lora_layers
from entropy_experiments.models.positions import Contexts, position_ids
from entropy_experiments.models.shared_prompts import Rows
from entropy_experiments.models.trials import (
    BEGINNING,
    FAILURES,
    Parts,
    Trial,
    UnsupportedModelError,
    accepted_arguments,
    difference,
    find_parts,
    first_line,
    name_of,
    own_trial,
    passing_tokens,
)
from entropy_experiments.numerics.derivatives import no_autocast
from entropy_experiments.numerics.forward_mode import frozen_weights
from entropy_experiments.types import Params


class FunctionalModel:
    """A model, and how it is called with parameters of ours."""

    def __init__(self, model: nn.Module, *, checkpointing: bool, training_gradient: bool) -> None:
        refuse_compiled(model)
        self.model = model
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
        self._parts: Parts | None = find_parts(model)
        self._experts = expert_configs(model)
        self.contexts: Contexts = Contexts.of(model)
        self.padding_index: int | None = None
        """What positions are counted from, as RoBERTa does; None: they are 0, 1, 2, ...."""
        self._truncated = False
        trial = self._own_trial()
        self._count_as_the_model_does(trial)
        with torch.enable_grad(), layers_without_gradients(model) as layers:
            self._call(model, self.params, trial.tokens_1S)
        self._truncated = bool(layers)
        """Some layers run without gradients (`GradientsKept`)."""

    @property
    def params(self) -> dict[str, Tensor]:
        """The trainable parameters by name, detached but sharing the model's memory."""
        mine = dict(self.model.named_parameters())
        return {name: mine[name].detach() for name in self._names}

    @property
    def device(self) -> torch.device:
        """Where tokens go in: the device of the input embeddings."""
        return causal_lm(self.model).get_input_embeddings().weight.device

    def _own_trial(self) -> Trial:
        with self.contexts.fresh():
            return own_trial(self.model)

    def _count_as_the_model_does(self, trial: Trial) -> None:
        """Find the positions with which a padded batch has the logits of the model's own calls."""
        gaps = []
        for padding in (None, getattr(causal_lm(self.model).config, "pad_token_id", None)):
            if gaps and padding is None:
                break
            self.padding_index = padding
            gaps.append(self._gap_to_own_call(trial))
            if gaps[-1] == 0:
                return
        raise UnsupportedModelError(
            f"{name_of(self.model)} has other logits in a batch with positions and padding than in "
            f"its own call on one sequence: {min(gaps):.2g} nats apart. Expected a model in which "
            "neither the padding after a sequence nor the rest of a batch matters."
        )

    def _gap_to_own_call(self, trial: Trial) -> float:
        try:
            with torch.no_grad():
                logits_NSV = self._call(self.model, self.params, trial.padded_NS)[0]
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            raise UnsupportedModelError(
                f"{name_of(self.model)} cannot be called with a padded batch of tokens, their "
                f"positions and a mask: {first_line(error)} Expected a causal LM that can."
            ) from error
        whole_SV, beginning_SV = logits_NSV
        return max(
            difference(whole_SV, trial.whole_SV),
            difference(beginning_SV[:BEGINNING], trial.beginning_SV),
        )

    def trial_pass(self) -> object:
        """A small pass, to be timed."""
        return self._states(self.params, passing_tokens(self.model))

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

    def _call(
        self,
        module: nn.Module,
        params: Params,
        tokens_NS: Tensor,
        rows: Rows | None = None,
    ) -> Any:
        attention: AbstractContextManager[Any] = nullcontext()
        if rows is None:
            if not self.contexts.beyond(tokens_NS.shape[1]):
                tokens_NS = tokens_NS[:, :-1]  # the last is drawn and never looked from
            position_NS = position_ids(tokens_NS, self.padding_index)
            # All ones, though there is padding: it comes after all that is looked at. Without a
            # mask some architectures warn, and others guess packed sequences from positions.
            inputs = (tokens_NS, position_NS, torch.ones_like(tokens_NS))
        else:
            attention, mask_R1SS = self._looking(rows)
            inputs = (rows.tokens_RS, rows.position_RS, mask_R1SS)
        named = dict(zip(("input_ids", "position_ids", "attention_mask"), inputs, strict=True))
        # Recomputation happens in backward.
        recompute = self._layers if records_a_graph() else ()
        with (
            no_autocast(),
            eval_mode(self.model),
            plain_inputs(self.model),
            fastest_attention(),
            plain_experts(self._experts),
            differentiate_dora_fully(self._dora),
            fused_adapters(self._adapters),
            PaddingRows(frozen=self._as_trained) if self._padded else nullcontext(),
            GradientsKept() if self._keeps_gradients() else nullcontext(),
            attention,
            recompute_layers(recompute, self._dora),
            frozen_weights(),
            self.contexts.fresh(),
        ):
            arguments = accepted_arguments(module, {**named, "use_cache": False})
            return call_with(module, params, (), arguments)

    def _keeps_gradients(self) -> bool:
        return self._truncated and not self._as_trained and torch.is_grad_enabled()

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
        mask_R1SS = mask_R1SS.masked_fill(~rows.looks_R1SS, lowest)
        return nullcontext(), mask_R1SS

    @property
    def _attention(self) -> str:
        return getattr(causal_lm(self.model).config, "_attn_implementation", "")


def refuse_compiled(model: Any) -> None:
    if hasattr(model, "_orig_mod"):
        raise ValueError(
            f"model is a {type(model._orig_mod).__name__} that torch.compile has wrapped; expected "
            "the model itself: pass the uncompiled model (model._orig_mod, whose weights are the "
            "same ones). Training may go on with the compiled one."
        )
