"""Slow and obvious versions, written as loops over rollouts and tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from entropy_experiments.types import Params, Rollouts
from oracles.enumeration import plain_scores


def rows(x_NS: Tensor, rollouts: Rollouts) -> list[list[Tensor]]:
    """The response entries of each rollout, as lists."""
    return [
        [x_NS[i, s] for s in rollouts.response_NS[i].nonzero().flatten().tolist()]
        for i in range(len(rollouts))
    ]


def weighted_entropy(
    policy: Any,
    params: Params,
    rollouts: Rollouts,
    *,
    form: str,
    unit: str = "token",
    entropy: str = "rao_blackwell",
) -> Tensor:
    """H at `params` from rollouts of `policy.params`: the importance-weighted ratio, by loops."""
    new_l, new_h = (rows(x, rollouts) for x in plain_scores(policy, params, rollouts))
    with torch.no_grad():
        old_l = rows(plain_scores(policy, policy.params, rollouts)[0], rollouts)
    top = bottom = torch.zeros((), dtype=torch.float64)
    for i, w in enumerate(rollouts.weight_N):
        ratios = [torch.exp(a - b) for a, b in zip(new_l[i], old_l[i])]
        whole = torch.ones((), dtype=torch.float64)
        for r in ratios:
            whole = whole * r
        before = torch.ones((), dtype=torch.float64)
        for k, r in enumerate(ratios):
            said = -new_l[i][k] if entropy == "simple" else new_h[i][k]
            if form == "snis":
                top = top + w * whole * said
                bottom = bottom + (w * whole if unit == "token" else 0.0)
            else:
                seen = before * r if entropy == "simple" else before
                top = top + w * seen * said
                bottom = bottom + (w * before if unit == "token" else 0.0)
            before = before * r
        if unit == "sequence":
            bottom = bottom + (w * whole if form == "snis" else w)
    return top / bottom


def weighted_taylor(
    policy: Any, rollouts: Rollouts, v: Params, *, order: int = 2, **options
) -> tuple[float, ...]:
    """Value, first and (order 2) second derivative of `weighted_entropy` along v, by autograd."""
    e = torch.zeros((), dtype=torch.float64, requires_grad=True)
    moved = {name: value + e * v[name] for name, value in policy.params.items()}
    value = weighted_entropy(policy, moved, rollouts, **options)
    (first,) = torch.autograd.grad(value, e, create_graph=order == 2)
    taylor = float(value.detach()), float(first.detach())
    return taylor if order == 1 else (*taylor, float(torch.autograd.grad(first, e)[0]))


def slope_formula(policy: Any, rollouts: Rollouts, v: Params, *, form: str) -> float:
    """The matched and to-go formulas of docs/theory.md, term by term."""
    e = torch.zeros((), dtype=torch.float64)

    def at(e: Tensor) -> tuple[Tensor, Tensor]:
        moved = {name: value + e * v[name] for name, value in policy.params.items()}
        return plain_scores(policy, moved, rollouts)

    found, slopes = torch.func.jvp(at, (e,), (torch.ones_like(e),))
    h = rows(found[1], rollouts)
    dl, dh = (rows(x, rollouts) for x in slopes)
    w = rollouts.weight_N
    tokens = sum(w[i] * len(h[i]) for i in range(len(w)))
    level = sum(w[i] * sum(h[i]) for i in range(len(w))) / tokens
    total = 0.0
    for i in range(len(w)):
        if form == "matched":
            total = total + w[i] * (sum(dh[i]) + (sum(h[i]) - level * len(h[i])) * sum(dl[i]))
        else:
            for k in range(len(h[i])):
                to_go = sum((x - level for x in h[i][k + 1 :]), 0.0)
                total = total + w[i] * (dh[i][k] + to_go * dl[i][k])
    return float(total / tokens)
