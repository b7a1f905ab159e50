"""Teacher forcing of a transformers causal LM, as a function of its trainable parameters.

Rollouts are moved to the left edge first, so that a batch gives the numbers of one rollout at a
time (`functional_model`). Rollouts of one prompt share a row (`shared_prompts`), where the model
allows it. The scores come back where the tokens were.

The decoder's hidden states meet the LM head at response positions only, inside `response_scores`.
That is right where logits are `head(hidden)` and nothing else; where they are not (an adapter on
the head, Gemma's soft cap, Granite's scaling; tried at construction, with states so large that a
cap would be seen) the model makes its own logits for the whole microbatch.

Every estimate begins with the model's own call on a few tokens once more (`repeatable`): weights
that training has changed in place since may show what they did not show before.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from entropy_experiments.models.call_conditions import (
    causal_lm,
    nothing_differentiated,
    records_a_graph,
)
from entropy_experiments.models.functional_model import FunctionalModel
from entropy_experiments.models.linear_layer_gradients import gradients_by_rollout
from entropy_experiments.models.shared_prompts import Packed, Rows, may_share, shared_rows
from entropy_experiments.models.trials import (
    FAILURES,
    HIGH,
    Parts,
    few_tokens,
    nearly_equal,
    scaled_states,
    trial_tokens,
    two_of_one_prompt,
)
from entropy_experiments.numerics.derivatives import no_autocast
from entropy_experiments.numerics.entropy import (
    before_response,
    nucleus_fingerprint,
    response_scores,
    response_support,
    token_scores,
)
from entropy_experiments.threads import choose_threads, timed_pass
from entropy_experiments.types import Params, Rollouts, Scores, check_params

KNOWN_MASKS = ("sdpa", "eager")
"""Implementations of attention that take a square mask."""


class SequenceProcessor(FunctionalModel):
    """A loaded transformers model as the estimators see it: a `Policy`, and a `NucleusPolicy`.

    Args:
        model: A causal LM; parameters that require a gradient are the policy's.
        temperature: Part of the policy, not of the sampler.
        top_p: Below 1 the policy *is* the truncated distribution.
        chunk: Tokens whose logits are in memory at a time; None: as memory allows.
        checkpointing: Recompute activations in the backward pass.
        training_gradient: Take the gradient that training takes, where that is not the derivative
            of the scores (see `as_trained`).

    Raises:
        ValueError: If `temperature` or `top_p` is out of range.

    Examples:
        >>> import torch
        >>> checkpoint = load_checkpoint(embedded_trajectory() / "checkpoint-13")
        >>> policy = SequenceProcessor(checkpoint.model)
        >>> batch, _ = load_update_batch(checkpoint.path / "update_batch")
        >>> few = batch.rollouts.take(torch.arange(4))
        >>> policy.score_all(few).entropy_NS.shape == few.tokens_NS.shape
        True
    """

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
        super().__init__(model, checkpointing=checkpointing, training_gradient=training_gradient)
        self.temperature: float = float(temperature)
        self.top_p: float = float(top_p)
        self.chunk: int | None = chunk
        choose_threads(self._device, self.trial_pass, anew=True)
        if self._parts is not None and not self._head_makes_the_logits(self._parts):
            self._parts = None
        self._shares = self._sharing_changes_nothing()

    def as_trained(self) -> SequenceProcessor:
        """The same scores with the gradient that *training* takes of them.

        They differ for DoRA, which trains as if its norms were constants, in the embedding of a
        padding token, which is not trained, and where a model runs layers without gradients. Use
        this one for the gradient of a training loss, and the other for the slope of an entropy.
        """
        if not (self._dora or self._padded or self._truncated):
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
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def repeatable(self) -> bool:
        """Whether a few tokens get the same states twice: no dropout, or none that stays on.

        Refused is a model whose own call no longer gives them, since its weights were changed.
        """
        tokens_NS = few_tokens(self.model)
        with torch.no_grad():
            once_NSX, again_NSX = (self._states(self.params, tokens_NS) for _ in range(2))
        if not torch.equal(once_NSX, again_NSX):
            return False
        self._count_as_the_model_does(self._own_trial())
        return True

    def without_sharing(self) -> SequenceProcessor:
        """The same scores with every rollout in a row of its own."""
        other = copy(self)
        other._shares = False
        return other

    def score(self, params: Params, rollouts: Rollouts) -> Scores:
        groups = self.contexts.groups(rollouts)
        if len(groups) > 1:
            apart = [self.score(params, rollouts.take(rows_N)) for rows_N in groups]
            return Scores(*(_rows_again(parts, groups) for parts in zip(*apart, strict=True)))
        packed = self._packed(rollouts)
        tokens = rollouts.tokens_NS.numel()
        kind = (records_a_graph(), nothing_differentiated(), tokens.bit_length())
        with timed_pass(kind, tokens, self._device, self.trial_pass):
            scores = self._reached(params, self._score(params, packed))
        return Scores(*map(packed.back, scores))

    def score_many(self, many: Sequence[Params], rollouts: Rollouts) -> list[Scores]:
        """The same rollouts under several parameter settings, one after the other."""
        return [self.score(params, rollouts) for params in many]

    def gradients_by_rollout(
        self, params: Params, rollouts: Rollouts, cotangents: Sequence[Scores]
    ) -> list[dict[str, Tensor]]:
        """For each cotangent c the gradients [n, *shape] of sum(c_l l + c_h h) by rollout."""
        # In a row of their own: what the layers see of a shared prompt belongs to all of them.
        alone = self.without_sharing().score
        return gradients_by_rollout(alone, self.model, params, rollouts, cotangents)

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
        groups = self.contexts.groups(rollouts)
        if len(groups) > 1:
            apart = [self.support(params, rollouts.take(rows_N)) for rows_N in groups]
            return _rows_again(apart, groups)
        packed = self._packed(rollouts)
        inside = packed.rollouts
        if self._parts is None:
            where, logits_TV = self._response_logits(params, packed)
            fingerprint_NS = torch.zeros_like(inside.tokens_NS).index_put(
                where,
                nucleus_fingerprint(logits_TV, temperature=self.temperature, top_p=self.top_p),
            )
        else:
            hidden_RSD, head_VD, bias_V = self._hidden(params, inside.tokens_NS, packed.rows)
            fingerprint_NS = response_support(
                hidden_RSD,
                head_VD,
                inside,
                place=packed.place,
                bias_V=bias_V,
                temperature=self.temperature,
                top_p=self.top_p,
            )
        return packed.back(fingerprint_NS)

    def _packed(self, rollouts: Rollouts) -> Packed:
        words = len(causal_lm(self.model).get_input_embeddings().weight)
        highest = int(rollouts.tokens_NS.max())
        if highest >= words:
            raise ValueError(
                f"The rollouts have token id {highest}, and the model has {words} tokens; expected "
                "ids below that. Were they drawn with another model or tokenizer?"
            )
        packed = Packed.of(rollouts, self.device)
        # Beyond the original context a row would have to end with a rollout's last token.
        if not self._shares or self.contexts.beyond(packed.rollouts.tokens_NS.shape[1]):
            return packed
        widest = getattr(causal_lm(self.model).config, "max_position_embeddings", None)
        square = self._attention != "sdpa" or records_a_graph()
        return replace(packed, rows=shared_rows(packed.rollouts, widest, square=square))

    def _from_hidden(
        self, hidden_RSD: Tensor, head_VD: Tensor, bias_V: Tensor | None, packed: Packed
    ) -> Scores:
        place, rollouts = packed.place, packed.rollouts
        return response_scores(
            hidden_RSD,
            head_VD,
            rollouts,
            place=place,
            bias_V=bias_V,
            chunk=self.chunk,
            temperature=self.temperature,
            top_p=self.top_p,
        )

    def _score(self, params: Params, packed: Packed) -> Scores:
        check_params("params", params, self.params)
        rollouts = packed.rollouts
        if self._parts is not None:
            hidden_RSD, head_VD, bias_V = self._hidden(params, rollouts.tokens_NS, packed.rows)
            return self._from_hidden(hidden_RSD, head_VD, bias_V, packed)
        where, logits_TV = self._response_logits(params, packed)
        logprob_T, entropy_T = token_scores(
            logits_TV,
            rollouts.tokens_NS[where],
            chunk=self.chunk,
            temperature=self.temperature,
            top_p=self.top_p,
        )
        empty_NS = logprob_T.new_zeros(rollouts.tokens_NS.shape)
        return Scores(empty_NS.index_put(where, logprob_T), empty_NS.index_put(where, entropy_T))

    def _reached(self, params: Params, scores: Scores) -> Scores:
        """Scores in whose graph every parameter is, those without any effect with a gradient of 0.

        What a decoder does not use of its checkpoint (a vision tower, attention to an encoder) and
        what only chooses tokens to look at (an indexer) would be taken for a broken graph.
        """
        if not records_a_graph() or not any(params[name].requires_grad for name in params):
            return scores
        nothing = sum(params[name].flatten()[0] * 0 for name in self._without_effect)
        return Scores(*(x_NS + nothing for x_NS in scores)) if self._without_effect else scores

    @cached_property
    def _without_effect(self) -> tuple[str, ...]:
        """Parameters that a few tokens' logits are no function of; none, if that is all of them."""
        leaves = {name: value.requires_grad_() for name, value in self.params.items()}
        if not leaves:  # a sharded model's gradients come another way
            return ()
        with torch.enable_grad():
            logits_NSV = self._call(self.model, leaves, trial_tokens(self.model))[0]
            gradients = torch.autograd.grad(
                logits_NSV.sum(), tuple(leaves.values()), allow_unused=True
            )
        names = tuple(n for n, g in zip(leaves, gradients, strict=True) if g is None)
        return names if len(names) < len(leaves) else ()

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

    def _response_logits(
        self, params: Params, packed: Packed
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        logits_RSV = self._states(params, packed.rollouts.tokens_NS, packed.rows)
        return before_response(logits_RSV, packed.rollouts, packed.place)

    def _sharing_changes_nothing(self) -> bool:
        """Two responses to one prompt, together and apart: the same states."""
        if not may_share(causal_lm(self.model).config) or self._attention not in KNOWN_MASKS:
            return False
        if self.padding_index is not None:
            return False
        packed = Packed.of(two_of_one_prompt(self.model), self.device)
        tokens_NS, rows = packed.rollouts.tokens_NS, shared_rows(packed.rollouts)
        assert rows is not None  # five tokens in place of eight: the last of each does not go in
        with torch.no_grad():
            apart_NSX = self._states(self.params, tokens_NS)
            try:
                together_RSX = self._states(self.params, tokens_NS, rows)
            except torch.OutOfMemoryError:
                raise
            except FAILURES:
                return False  # an architecture that makes its own mask from a flat one
        row_NS, column_NS = (x_NS[:, :-1].to(together_RSX.device) for x_NS in rows.place)
        return nearly_equal(together_RSX[row_NS, column_NS], apart_NSX, apart_NSX.dtype)

    def _head_makes_the_logits(self, parts: Parts) -> bool:
        """Of states as they are, and of states so large that a soft cap would be seen.

        So it does not matter how large the logits of these weights happen to be.
        """
        tokens_NS = few_tokens(self.model)
        try:
            with torch.no_grad(), no_autocast():
                hidden_NSD, head_VD, bias_V = self._hidden(self.params, tokens_NS)
                linear_NSV = nn.functional.linear(hidden_NSD.to(head_VD.dtype), head_VD)
                largest = float(linear_NSV.abs().max())
                if not 0 < largest < torch.inf:
                    return False  # nothing to be seen: the model's own logits are always right
                for factor in (1.0, HIGH / largest):
                    with scaled_states(parts.decoder, factor):
                        own_NSV = self._call(self.model, self.params, tokens_NS)[0]
                    large_NSD = (hidden_NSD * factor).to(head_VD.dtype)
                    linear_NSV = nn.functional.linear(large_NSD, head_VD, bias_V)
                    if not nearly_equal(linear_NSV, own_NSV, hidden_NSD.dtype):
                        return False
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            return False  # a head with layers of its own before it
        return True


def _rows_again(parts: Sequence[Tensor], groups: Sequence[Tensor]) -> Tensor:
    """Rows of several groups in their order before they were parted."""
    order_N = torch.cat(list(groups)).argsort()
    together_NS = torch.cat(list(parts))
    return together_NS[order_N.to(together_NS.device)]
