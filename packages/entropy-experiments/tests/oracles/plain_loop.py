"""Scores, measured changes and slopes as anybody would write them: one rollout at a time.

The model's own call on the tokens of one rollout and nothing else, `log_softmax`, loops in python,
and torch's ordinary backward. Nothing of the package but its types is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from entropy_experiments.types import Rollouts

FORMS = ("snis", "per_decision")


@dataclass(frozen=True)
class Scored:
    """Log-probability and entropy of each drawn token, by rollout."""

    logprob: list[list[Tensor]]
    entropy: list[list[Tensor]]


@dataclass(frozen=True)
class Plain:
    """What the loop says of a model, its rollouts and a direction."""

    logprob_NS: Tensor
    entropy_NS: Tensor
    change: dict[str, float]
    slope: dict[str, float]


def plain(model: nn.Module, rollouts: Rollouts, v: Mapping[str, Tensor], eta: float) -> Plain:
    """Scores at theta; H(theta + eta v) - H(theta) and dH/deta, in both forms."""
    trained = {name: p for name, p in model.named_parameters() if name in v}
    here = scored(model, rollouts)
    old = [[x.detach() for x in row] for row in here.logprob]
    level, slope = {}, {}
    for k, form in enumerate(FORMS):
        value = weighted(here, old, rollouts, form)
        gradients = torch.autograd.grad(
            value, list(trained.values()), retain_graph=k == 0, allow_unused=True
        )
        level[form] = float(value.detach())
        slope[form] = sum(
            float((g.double() * v[name].double()).sum())
            for name, g in zip(trained, gradients, strict=True)
            if g is not None
        )
    with torch.no_grad(), moved(trained, v, eta):
        there = scored(model, rollouts)
    change = {form: float(weighted(there, old, rollouts, form)) - level[form] for form in FORMS}
    with torch.no_grad():
        logprob_NS, entropy_NS = (laid_out(x, rollouts) for x in (here.logprob, here.entropy))
    return Plain(logprob_NS, entropy_NS, change, slope)


def scored(model: nn.Module, rollouts: Rollouts) -> Scored:
    logprobs, entropies = [], []
    for n in range(len(rollouts)):
        columns = rollouts.attention_NS[n].nonzero().flatten()
        tokens_S = rollouts.tokens_NS[n, columns]
        logp_SV = model(input_ids=tokens_S[None]).logits[0].double().log_softmax(-1)
        logprobs.append([])
        entropies.append([])
        for s in range(1, len(columns)):
            if rollouts.response_NS[n, columns[s]]:
                logprobs[-1].append(logp_SV[s - 1, tokens_S[s]])
                entropies[-1].append(-(logp_SV[s - 1].exp() * logp_SV[s - 1]).sum())
    return Scored(logprobs, entropies)


def weighted(new: Scored, old: Sequence[Sequence[Tensor]], rollouts: Rollouts, form: str) -> Tensor:
    """Entropy per token of the new parameters, from rollouts of the old ones."""
    top = bottom = torch.zeros((), dtype=torch.float64)
    for n, w in enumerate(rollouts.weight_N.tolist()):
        ratios = [(a - b).exp() for a, b in zip(new.logprob[n], old[n], strict=True)]
        whole = torch.stack(ratios).prod()
        before = torch.ones((), dtype=torch.float64)
        for ratio, h in zip(ratios, new.entropy[n], strict=True):
            weight = w * (whole if form == "snis" else before)
            top, bottom = top + weight * h, bottom + weight
            before = before * ratio
    return top / bottom


def laid_out(rows: Sequence[Sequence[Tensor]], rollouts: Rollouts) -> Tensor:
    out_NS = torch.zeros(rollouts.tokens_NS.shape, dtype=torch.float64)
    for n, row in enumerate(rows):
        out_NS[n, rollouts.response_NS[n]] = torch.stack(list(row))
    return out_NS


@contextmanager
def moved(trained: Mapping[str, Tensor], v: Mapping[str, Tensor], eta: float) -> Iterator[None]:
    """Inside, the parameters are those of the step; outside, their own bits again."""
    before = {name: p.detach().clone() for name, p in trained.items()}
    for name, p in trained.items():
        p.copy_(before[name] + eta * v[name])
    try:
        yield
    finally:
        for name, p in trained.items():
            p.copy_(before[name])
