"""The truth about a policy small enough to list everything it can say.

Plain log_softmax over plain logits, differentiated by plain autograd: no code of the package is
used to compute a truth.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from entropy_experiments.types import Params, Policy, Rollouts

EOS = 0


class Enumerable(Policy, Protocol):
    vocabulary: int
    horizon: int
    prompts: int

    def logits(self, params: Params, tokens_NS: Tensor, attention_NS: Tensor) -> Tensor:
        """[N, S, V]: at [n, s] the law of token s + 1."""
        ...

    def prompt_tokens(self, prompt: int) -> list[int]: ...


def responses(vocabulary: int, horizon: int) -> list[list[int]]:
    """Every response: it ends with EOS, or at the horizon."""
    done: list[list[int]] = []
    open_: list[list[int]] = [[]]
    for _ in range(horizon):
        grown = [[*prefix, token] for prefix in open_ for token in range(vocabulary)]
        done += [r for r in grown if r[-1] == EOS]
        open_ = [r for r in grown if r[-1] != EOS]
    return done + open_


def all_rollouts(policy: Enumerable) -> Rollouts:
    """Every response to every prompt, weighted by its exact probability (prompts equally)."""
    listed = responses(policy.vocabulary, policy.horizon)
    rows, masks, prompts = [], [], []
    for prompt in range(policy.prompts):
        head = policy.prompt_tokens(prompt)
        for response in listed:
            rows.append(head + response)
            masks.append([False] * len(head) + [True] * len(response))
            prompts.append(prompt)
    width = max(map(len, rows))
    pad = [width - len(row) for row in rows]
    tokens_NS = torch.tensor([r + [0] * p for r, p in zip(rows, pad, strict=True)])
    response_NS = torch.tensor([m + [False] * p for m, p in zip(masks, pad, strict=True)])
    attention_NS = torch.tensor([[True] * len(r) + [False] * p for r, p in zip(rows, pad)])
    rollouts = Rollouts(
        tokens_NS=tokens_NS,
        attention_NS=attention_NS,
        response_NS=response_NS,
        prompt_N=torch.tensor(prompts),
    )
    with torch.no_grad():
        logp_N, _ = _rollout_sums(policy, policy.params, rollouts)
    return with_weights(rollouts, logp_N.double().exp() / policy.prompts)


def with_weights(rollouts: Rollouts, weight_N: Tensor) -> Rollouts:
    from dataclasses import replace

    return replace(rollouts, weight_N=weight_N / weight_N.sum())


def plain_scores(policy: Enumerable, params: Params, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """l_NS and h_NS, zero outside the response, by the textbook formulas."""
    logits_NSV = policy.logits(params, rollouts.tokens_NS, rollouts.attention_NS)
    logp_NSV = (logits_NSV[:, :-1] / policy.temperature).log_softmax(-1)
    l_NS = logp_NSV.gather(-1, rollouts.tokens_NS[:, 1:, None].clamp(max=policy.vocabulary - 1))
    h_NS = -(logp_NSV.exp() * logp_NSV).sum(-1)
    inside_NS = rollouts.response_NS[:, 1:]
    return tuple(
        torch.nn.functional.pad(torch.where(inside_NS, x_NS, 0.0), (1, 0))
        for x_NS in (l_NS.squeeze(-1), h_NS)
    )


def exact_entropy(policy: Enumerable, params: Params, *, unit: str = "token") -> Tensor:
    """H(params): expectations over the policy *at params*, by listing every response."""
    rollouts = all_rollouts(policy)  # weights unused: only the list of responses is
    logp_N, entropy_N = _rollout_sums(policy, params, rollouts)
    p_N = logp_N.exp() / policy.prompts
    if unit == "sequence":
        return (p_N * entropy_N).sum()
    return (p_N * entropy_N).sum() / (p_N * rollouts.tokens_N).sum()


def exact_slope(policy: Enumerable, params: Params, v: Params, *, unit: str = "token") -> float:
    return exact_taylor(policy, params, v, unit=unit)[1]


def exact_taylor(
    policy: Enumerable, params: Params, v: Params, *, unit: str = "token"
) -> tuple[float, float, float]:
    """H, D_v H and D_v D_v H along theta + e v, by autograd in the scalar e."""
    e = torch.zeros((), dtype=torch.float64, requires_grad=True)
    moved = {name: value + e * v[name] for name, value in params.items()}
    value = exact_entropy(policy, moved, unit=unit)
    (first,) = torch.autograd.grad(value, e, create_graph=True)
    (second,) = torch.autograd.grad(first, e)
    return float(value.detach()), float(first.detach()), float(second)


def exact_change(
    policy: Enumerable, params: Params, v: Params, eta: float, *, unit: str = "token"
) -> float:
    with torch.no_grad():
        moved = {name: value + eta * v[name] for name, value in params.items()}
        after, before = (exact_entropy(policy, p, unit=unit) for p in (moved, params))
    return float(after - before)


def _rollout_sums(policy: Enumerable, params: Params, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    l_NS, h_NS = plain_scores(policy, params, rollouts)
    return l_NS.sum(1), h_NS.sum(1)
