"""Drawing the responses of one unit of prompts: a decode loop with a KV cache, and nothing hidden.

Token k of a rollout is the inverse distribution function of the policy at u_k, in fp64:

    y = min { v : p(0) + ... + p(v) > u_k },    u_k from the rollout's own generator

so which rollouts share a batch changes no draw (beyond rounding of the logits), and no library
setting (top_k, repetition penalty, a generation_config's temperature) can change the
distribution. With top_p < 1 p is restricted to `numerics.entropy.nucleus`, as it is when scored.

Prompts are padded on the left and computed once per prompt; rows that end leave the batch. Where a
model's cache does not give the logits of the whole sequence (a state that it keeps to itself, rows
that cannot leave), which a few tokens show, every step computes the whole sequences again.

Where ranks need each other for a pass (`models.sharded`), another token on one of them, by a last
digit of its logits, would part their ways. So rank 0 draws, and `broadcast` sends each step
to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from entropy_experiments.models.positions import count_tokens, next_position_ids, position_ids
from entropy_experiments.models.trials import FAILURES, nearly_equal
from entropy_experiments.numerics.entropy import nucleus
from entropy_experiments.threads import timed_pass

REPORT_EVERY = 16
"""Decode steps between two reports of progress."""

_right_caches: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One response to be drawn: its prompt, and the seed of its own uniforms."""

    prompt: tuple[int, ...]
    seed: int


@dataclass(frozen=True, kw_only=True)
class Drawn:
    tokens: list[int]
    logprobs: list[float]
    truncated: bool


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step drew for the rows of the batch, and which of them go on."""

    tokens: list[int]
    logprobs: list[float]
    staying: list[int]


def draw_here(local: Callable[[], Step]) -> Step:
    return local()


class LastLogits:
    """Logits of the last position, as `SequenceProcessor` would score it.

    Where the policy's logits are `head(hidden)`, the head is applied here, in fp32 at least: a
    model's own bf16 logits would be another distribution than the one that is scored.
    """

    def __init__(self, policy: Any) -> None:
        self.policy, self.model = policy, policy.model
        self.padding_index, self.contexts = policy.padding_index, policy.contexts
        inner = getattr(self.model, "get_base_model", None)
        self.lm: Any = inner() if callable(inner) else self.model
        self.device = self.lm.get_input_embeddings().weight.device
        self._head: nn.Linear | None = None
        if policy.logits_path == "head":
            self._head = self.lm.get_output_embeddings()
            self._decoder = getattr(self.lm, self.lm.base_model_prefix)
            assert self._head is not None
            self._weight = _full(self._head.weight.detach())
            bias = self._head.bias
            self._bias = None if bias is None else _full(bias.detach())

    def trial_pass(self) -> object:
        """A small pass of the policy, to be timed."""
        return self.policy.trial_pass()

    def __call__(self, **inputs: Any) -> Tensor:
        if self._head is None:
            return _full(self.model(**inputs, logits_to_keep=1).logits[:, -1])
        return self._of_hidden(self._decoder(**inputs)[0][:, -1])

    def of_whole(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """The same without a cache: whole sequences, padded on the right, where nothing looks."""
        width = max(map(len, rows))
        tokens_NS = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        tokens_NS = tokens_NS.to(self.device)
        inputs = {
            "input_ids": tokens_NS,
            "position_ids": position_ids(tokens_NS, self.padding_index),
            "attention_mask": torch.ones_like(tokens_NS),
            "use_cache": False,
        }
        row_N, last_N = torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])
        if self._head is None:
            return _full(self.model(**inputs).logits[row_N, last_N])
        return self._of_hidden(self._decoder(**inputs)[0][row_N, last_N])

    def _of_hidden(self, hidden_ND: Tensor) -> Tensor:
        hidden_ND = _full(hidden_ND.to(self._weight.device))
        return nn.functional.linear(hidden_ND, self._weight, self._bias)

    @property
    def cache_is_right(self) -> bool:
        """Whether a few tokens get the same logits by the cache as without; tried once a model."""
        if self.model not in _right_caches:
            _right_caches[self.model] = self._try_cache()
        return _right_caches[self.model]

    def _try_cache(self) -> bool:
        vocabulary = len(self.lm.get_input_embeddings().weight)
        prompts = [[k * (n + 2) % vocabulary for k in range(1, 8)] for n in range(2)]
        rows = [prompts[0], prompts[1], prompts[1]]
        wanted = [self.of_whole(rows)]
        try:
            cached = Cached(self, prompts, torch.tensor([0, 1, 1], device=self.device))
            logits = [cached.logits_NV]
            for token, staying in ((3, [0, 1, 2]), (4, [0, 2]), (5, [0, 1])):
                rows = [[*rows[row], token % vocabulary] for row in staying]
                wanted.append(self.of_whole(rows))
                logits.append(cached.after(staying, [row[-1] for row in rows]))
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            return False
        dtype = self.lm.get_input_embeddings().weight.dtype
        return all(nearly_equal(a, b, dtype) for a, b in zip(logits, wanted, strict=True))


class Cached:
    """Logits after each token, from a KV cache."""

    def __init__(
        self, logits: LastLogits, prompts: Sequence[Sequence[int]], which_N: Tensor
    ) -> None:
        from transformers import DynamicCache

        self._logits = logits
        self._cache = DynamicCache(config=logits.lm.config)
        tokens_PS, attention_PS = _left_padded(prompts, logits.device)
        padding = logits.padding_index
        logits_PV = logits(
            input_ids=tokens_PS,
            attention_mask=attention_PS,
            position_ids=position_ids(tokens_PS, padding, attention_PS),
            past_key_values=self._cache,
            use_cache=True,
        )
        self.logits_NV = logits_PV[which_N.to(logits_PV.device)]
        self._keep(which_N)
        self._attention_NS = attention_PS[which_N]
        self._count_N = count_tokens(tokens_PS, padding, attention_PS)[which_N]

    def after(self, staying: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Logits of the rows that stay, each with its token."""
        device = self._logits.device
        if len(staying) < len(self._count_N):
            keep_N = torch.tensor(staying, device=device)
            self._keep(keep_N)
            self._attention_NS = self._attention_NS[keep_N]
            self._count_N = self._count_N[keep_N]
        self._attention_NS = nn.functional.pad(self._attention_NS, (0, 1), value=1)
        token_N = torch.tensor(tokens, device=device)
        position_N, self._count_N = next_position_ids(
            token_N, self._count_N, self._logits.padding_index
        )
        count = len(token_N)
        with timed_pass(("decode", count.bit_length()), count, device, self._logits.trial_pass):
            return self._logits(
                input_ids=token_N[:, None],
                attention_mask=self._attention_NS,
                position_ids=position_N[:, None],
                past_key_values=self._cache,
                use_cache=True,
            )

    def _keep(self, rows_N: Tensor) -> None:
        cache: Any = self._cache  # its layers are of several kinds, by the model
        for layer in cache.layers:
            # A recurrent state is reordered; selecting would leave it out, or is not there.
            if hasattr(layer, "recurrent_states"):
                layer.reorder_cache(rows_N)
            else:
                layer.batch_select_indices(rows_N)


class Recomputed:
    """The same from whole sequences, for models whose cache is not to be relied on."""

    def __init__(
        self, logits: LastLogits, prompts: Sequence[Sequence[int]], which_N: Tensor
    ) -> None:
        self._logits = logits
        self._rows = [list(prompts[n]) for n in which_N.tolist()]
        self.logits_NV = logits.of_whole(self._rows)

    def after(self, staying: Sequence[int], tokens: Sequence[int]) -> Tensor:
        self._rows = [[*self._rows[row], token] for row, token in zip(staying, tokens, strict=True)]
        return self._logits.of_whole(self._rows)


def decode(
    logits: LastLogits,
    draws: Sequence[Draw],
    *,
    temperature: float,
    top_p: float,
    max_new_tokens: int,
    ends: Sequence[int],
    stops: Callable[[list[int]], bool] | None,
    report: Callable[[int], None],
    broadcast: Callable[[Callable[[], Step]], Step] = draw_here,
) -> list[Drawn]:
    """The responses of one unit; `report` gets the number of tokens drawn since its last call.

    `broadcast` decides where a step is drawn: on this rank, or on rank 0 for all of them
    (`Ranks.broadcast_from_zero`).
    """
    _check_context(logits, draws, max_new_tokens)
    device = logits.device
    uniform_NT = torch.stack([_uniforms(draw.seed, max_new_tokens) for draw in draws])
    prompts = sorted({draw.prompt for draw in draws})
    which_N = torch.tensor([prompts.index(draw.prompt) for draw in draws], device=device)
    reading = (Cached if logits.cache_is_right else Recomputed)(logits, prompts, which_N)
    logits_NV = reading.logits_NV

    drawn = partial(_step, temperature=temperature, top_p=top_p, ends=frozenset(ends), stops=stops)
    results = [Drawn(tokens=[], logprobs=[], truncated=True) for _ in draws]
    alive = list(range(len(draws)))
    unreported = 0
    for step in range(max_new_tokens):
        before = [results[n].tokens for n in alive]
        drawn_step = broadcast(partial(drawn, logits_NV, uniform_NT[alive, step], before))
        for row, n in enumerate(alive):
            results[n].tokens.append(drawn_step.tokens[row])
            results[n].logprobs.append(drawn_step.logprobs[row])
        for row in set(range(len(alive))).difference(drawn_step.staying):
            results[alive[row]] = replace(results[alive[row]], truncated=False)
        unreported += len(alive)
        if not drawn_step.staying or step + 1 == max_new_tokens:
            break
        if (step + 1) % REPORT_EVERY == 0:
            report(unreported)
            unreported = 0
        alive = [alive[row] for row in drawn_step.staying]
        logits_NV = reading.after(
            drawn_step.staying, [drawn_step.tokens[row] for row in drawn_step.staying]
        )
    report(unreported)
    return results


def _step(
    logits_NV: Tensor,
    uniform_N: Tensor,
    before: Sequence[list[int]],
    *,
    temperature: float,
    top_p: float,
    ends: frozenset[int],
    stops: Callable[[list[int]], bool] | None,
) -> Step:
    token_N, logprob_N = inverse_cdf(logits_NV, uniform_N, temperature=temperature, top_p=top_p)
    tokens = token_N.tolist()
    staying = [
        row
        for row, (earlier, token) in enumerate(zip(before, tokens, strict=True))
        if token not in ends and not (stops is not None and stops([*earlier, token]))
    ]
    return Step(tokens=tokens, logprobs=logprob_N.tolist(), staying=staying)


def inverse_cdf(
    logits_NV: Tensor, uniform_N: Tensor, *, temperature: float, top_p: float
) -> tuple[Tensor, Tensor]:
    """(token, its log-prob) for one uniform per row, on the CPU."""
    z_NV = _full(logits_NV)
    z_NV = z_NV if temperature == 1.0 else z_NV / temperature
    if not bool(torch.isfinite(z_NV.amax(-1)).all()):
        raise ValueError(
            "The policy's logits are not finite (NaN or +inf); no token can be drawn. Check the "
            "checkpoint's weights, or set checkpoint.dtype to float32."
        )
    wide_NV = z_NV.double()
    if top_p < 1.0:
        wide_NV = wide_NV.masked_fill(~nucleus(z_NV, top_p), -torch.inf)
    logp_NV = wide_NV.log_softmax(-1)
    cdf_NV = logp_NV.exp().cumsum(-1)
    # u times the last entry, which rounding keeps from being one: no u is beyond all tokens.
    goal_N1 = uniform_N.to(cdf_NV.device)[:, None] * cdf_NV[:, -1:]
    token_N1 = torch.searchsorted(cdf_NV, goal_N1, right=True)
    last_N1 = torch.searchsorted(cdf_NV, cdf_NV[:, -1:].contiguous())  # the last one with p > 0
    token_N1 = torch.minimum(token_N1, last_N1)
    return token_N1[:, 0].cpu(), logp_NV.gather(1, token_N1)[:, 0].cpu()


def _uniforms(seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, dtype=torch.float64, generator=generator)


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(tokens, attention)."""
    width = max(map(len, prompts))
    tokens_PS = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    attention_PS = torch.tensor(
        [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device
    )
    return tokens_PS, attention_PS


def _check_context(logits: LastLogits, draws: Sequence[Draw], max_new_tokens: int) -> None:
    """Refuse what would be drawn with other rotary factors than it is scored with.

    Keys that are kept have the factors of the length at which they were made.
    """
    original = logits.contexts.original
    lengths = [len(draw.prompt) for draw in draws]
    if original is None or max(lengths) + max_new_tokens <= original:
        return
    if min(lengths) > original and not logits.contexts.by_length:
        return
    raise ValueError(
        f"Prompts of up to {max(lengths)} tokens with max_new_tokens = {max_new_tokens} go beyond "
        f"the original context of {original} tokens, where {type(logits.lm).__name__} changes its "
        "rotary factors (longrope or dynamic NTK): what is drawn token by token would not be what "
        "is scored. Lower max_new_tokens, or give rollouts that were drawn elsewhere."
    )


def _full(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
