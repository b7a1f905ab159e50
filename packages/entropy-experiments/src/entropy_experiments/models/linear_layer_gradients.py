"""Gradients of every rollout of a microbatch at once, through the linear layers of the model.

A linear layer y = a W^T + b that sees input a_ns and gradient d_ns at position s of rollout n has

    dW_n = sum_s d_ns a_ns^T,      db_n = sum_s d_ns

and the sum over n is all that backward keeps. A forward hook notes a and puts a hook on y, which
is told d: so one backward gives the gradient of each rollout. Several uses of a layer add up;
padding adds 0, since cotangents there are zero.

That needs every trainable parameter to be the weight or bias of one nn.Linear and to act through
its forward alone: LoRA is so, DoRA (norms of B A), embeddings, norms and tied heads are not. What
cannot be seen from the modules is seen from the sums: over rollouts they must give autograd's own
gradient. Where anything is amiss the rollouts go one by one: the same numbers, only slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from entropy_experiments.numerics.derivatives import no_autocast
from entropy_experiments.numerics.rollout_gradients import (
    Score,
    at_least_fp32,
    check_cotangents,
    gradients_one_by_one,
    weighted_sum,
)
from entropy_experiments.types import Params, Rollouts, Scores

SUM_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Between the sum over rollouts and autograd's gradient, relative to the rollouts' norms added;
half precision gets HALF_TOLERANCE. A use of a parameter that went unseen misses by far more."""
HALF_TOLERANCE = 0.03

Owners = Mapping[nn.Module, Mapping[str, str]]


def gradients_by_rollout(
    score: Score, model: nn.Module, params: Params, rollouts: Rollouts, cotangents: Sequence[Scores]
) -> list[dict[str, Tensor]]:
    """For each cotangent c the gradients [n, *shape] of sum(c_l l + c_h h) of each rollout."""
    check_cotangents(rollouts, cotangents)
    owners = linear_owners(model, params)
    gradients = None if owners is None else batched(score, owners, params, rollouts, cotangents)
    if gradients is None:
        return gradients_one_by_one(score, params, rollouts, cotangents)
    return gradients


def linear_owners(model: nn.Module, names: Params) -> Owners | None:
    """Which nn.Linear has which parameters; None if one belongs elsewhere, or to several."""
    homes: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, value in module.named_parameters(recurse=False):
            homes.setdefault(id(value), []).append((module, key))
    owners: dict[nn.Module, dict[str, str]] = {}
    for name, value in model.named_parameters():
        if name not in names:
            continue
        (module, key), *others = homes[id(value)]
        # Exactly nn.Linear: a subclass may have another forward.
        if others or type(module) is not nn.Linear:
            return None
        owners.setdefault(module, {})[key] = name
    return owners


def batched(
    score: Score, owners: Owners, params: Params, rollouts: Rollouts, cotangents: Sequence[Scores]
) -> list[dict[str, Tensor]] | None:
    """One forward, one backward per cotangent; None if the sums show that a use went unseen."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    caught = _Caught(len(rollouts))
    with torch.enable_grad(), no_autocast(), _listening(owners, caught):
        scores = score(leaves, rollouts)
    if not caught.by_rollout:
        return None
    gradients = []
    for cotangent in cotangents:
        caught.gradients = {}
        value = weighted_sum(scores, cotangent, rollouts.response_NS)
        with no_autocast():
            sums = torch.autograd.grad(
                value, tuple(leaves.values()), retain_graph=True, allow_unused=True
            )
        mine = {name: caught.gradients.get(name) for name in leaves}
        if not _adds_up(mine, dict(zip(leaves, sums, strict=True))):
            return None
        gradients.append(mine)
    return gradients


class _Caught:
    """What the hooks collect during one backward."""

    def __init__(self, rollouts: int) -> None:
        self.rollouts = rollouts
        self.gradients: dict[str, Tensor] = {}
        self.by_rollout = True
        """Every layer saw [rollouts, positions, width]; experts that mix tokens do not."""

    def note(self, names: Mapping[str, str], inputs: tuple[Any, ...], output: Tensor) -> None:
        a = inputs[0].detach() if inputs else None
        if a is None or a.dim() < 3 or a.shape[0] != self.rollouts:
            self.by_rollout = False
        elif output.requires_grad:
            output.register_hook(lambda d: self._add(names, a.flatten(1, -2), d.flatten(1, -2)))

    def _add(self, names: Mapping[str, str], a_NSI: Tensor, d_NSO: Tensor) -> None:
        if "weight" in names:
            self._plus(names["weight"], d_NSO.mT @ a_NSI.to(d_NSO.dtype))
        if "bias" in names:
            self._plus(names["bias"], d_NSO.sum(1))

    def _plus(self, name: str, more: Tensor) -> None:
        before = self.gradients.get(name)
        self.gradients[name] = at_least_fp32(more) if before is None else before + more


@contextmanager
def _listening(owners: Owners, caught: _Caught) -> Iterator[None]:
    def hook_of(names: Mapping[str, str]) -> Any:
        return lambda module, inputs, output: caught.note(names, inputs, output)

    handles = [module.register_forward_hook(hook_of(names)) for module, names in owners.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _adds_up(mine: Mapping[str, Tensor | None], sums: Mapping[str, Tensor | None]) -> bool:
    for name, total in sums.items():
        gradients = mine[name]
        # A parameter without any gradient is an error, which the other way words.
        if total is None or gradients is None:
            return False
        tolerance = SUM_TOLERANCE.get(total.dtype, HALF_TOLERANCE)
        size = gradients.flatten(1).norm(dim=1).sum()
        if not bool((gradients.sum(0) - total).norm() <= tolerance * size):
            return False
    return True
