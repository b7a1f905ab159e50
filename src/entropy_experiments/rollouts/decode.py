"""Drawing the responses of one unit of prompts: a decode loop with a KV cache, and nothing hidden.

Token k of a rollout is the inverse distribution function of the policy's law at u_k, in fp64:

    y = min { v : p(0) + ... + p(v) > u_k },    u_k from the rollout's own generator

so which rollouts share a batch changes no draw (beyond rounding of the logits), and no library
setting (top_k, repetition penalty, a generation_config's temperature) can bend the law. With
top_p < 1 p is `numerics.entropy.nucleus`'s law, which is also the one that is scored.

Prompts are padded on the left and computed once per prompt; rows that end leave the batch.

Where ranks need each other for a pass (`policy.sharded`), another token on one of them, by a last
digit of its logits, would part their ways. So rank 0 draws, and the others are `told` each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from entropy_experiments.numerics.entropy import nucleus
from entropy_experiments.policy.positions import counted, following, tokens_counted

REPORT_EVERY = 16
"""Decode steps between two reports of progress."""


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


def _drawn_here(local: Callable[[], Step]) -> Step:
    return local()


class LastLogits:
    """Logits of the last position, as `SequenceProcessor` would score it.

    Where the policy's logits are `head(hidden)`, the head is applied here, in fp32 at least: a
    model's own bf16 logits would be another law than the one that is scored.
    """

    def __init__(self, policy: Any) -> None:
        self.model = policy.model
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

    def __call__(self, **inputs: Any) -> Tensor:
        if self._head is None:
            return _full(self.model(**inputs, logits_to_keep=1).logits[:, -1])
        hidden_ND = self._decoder(**inputs)[0][:, -1].to(self._weight.device)
        return nn.functional.linear(_full(hidden_ND), self._weight, self._bias)


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
    told: Callable[[Callable[[], Step]], Step] = _drawn_here,
) -> list[Drawn]:
    """The responses of one unit; `report` is told how many tokens were drawn since last time.

    `told` decides where a step is drawn (`Ranks.told`: on rank 0, for all); here unless given.
    """
    from transformers import DynamicCache

    _check_context(logits, draws, max_new_tokens)
    device, padding = logits.device, logits.padding_index
    uniform_NT = torch.stack([_uniforms(draw.seed, max_new_tokens) for draw in draws])
    prompts = sorted({draw.prompt for draw in draws})
    which_N = torch.tensor([prompts.index(draw.prompt) for draw in draws], device=device)
    cache = DynamicCache(config=logits.lm.config)
    tokens_PS, attention_PS = _left_padded(prompts, device)
    logits_PV = logits(
        input_ids=tokens_PS,
        attention_mask=attention_PS,
        position_ids=counted(tokens_PS, padding, attention_PS),
        past_key_values=cache,
        use_cache=True,
    )
    logits_NV = logits_PV[which_N.to(logits_PV.device)]
    cache.batch_select_indices(which_N)
    attention_NS = attention_PS[which_N]
    count_N = tokens_counted(tokens_PS, padding, attention_PS)[which_N]

    drawn = partial(_step, temperature=temperature, top_p=top_p, ends=frozenset(ends), stops=stops)
    results = [Drawn(tokens=[], logprobs=[], truncated=True) for _ in draws]
    alive = list(range(len(draws)))
    unreported = 0
    for step in range(max_new_tokens):
        before = [results[n].tokens for n in alive]
        found = told(partial(drawn, logits_NV, uniform_NT[alive, step], before))
        for row, n in enumerate(alive):
            results[n].tokens.append(found.tokens[row])
            results[n].logprobs.append(found.logprobs[row])
        for row in set(range(len(alive))).difference(found.staying):
            results[alive[row]] = replace(results[alive[row]], truncated=False)
        unreported += len(alive)
        if not found.staying or step + 1 == max_new_tokens:
            break
        if (step + 1) % REPORT_EVERY == 0:
            report(unreported)
            unreported = 0
        if len(found.staying) < len(alive):
            keep_N = torch.tensor(found.staying, device=device)
            cache.batch_select_indices(keep_N)
            attention_NS, count_N = attention_NS[keep_N], count_N[keep_N]
            alive = [alive[row] for row in found.staying]
        attention_NS = nn.functional.pad(attention_NS, (0, 1), value=1)
        token_N1 = torch.tensor([[found.tokens[row]] for row in found.staying], device=device)
        position_N, count_N = following(token_N1[:, 0], count_N, padding)
        logits_NV = logits(
            input_ids=token_N1,
            attention_mask=attention_NS,
            position_ids=position_N[:, None],
            past_key_values=cache,
            use_cache=True,
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


def _left_padded(prompts: Sequence[tuple[int, ...]], device: torch.device) -> tuple[Tensor, Tensor]:
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
