"""How an update changes the refinement policy's entropy: predicted before it, measured after it.

The entropy is that of the Gaussian before squashing,
H(s) = sum_i log sigma_i(s) + (E/2) log 2 pi e, in mean over the batch's states. AdamW's step v is
rebuilt exactly by entropy_experiments.update from the gradients and the moments, so that

    predicted  <grad_theta mean H, lr v>        actual  mean H(theta + lr v) - mean H(theta)

differ by the curvature of H alone. Arithmetic is fp64 on a copy: a change of 1e-6 in an entropy of
some hundred nats is below the rounding of fp32.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from arc_refine.policy import RefinePolicy
from entropy_experiments import AdamGroup, OptimizerState, adamw_direction


def mean_entropy(policy: RefinePolicy, state_BS: Tensor) -> float:
    """In nats, mean over states, computed in fp64."""
    with torch.no_grad():
        return float(_double(policy).entropy(state_BS.detach().double()).mean())


@dataclass(frozen=True, kw_only=True)
class EntropyBefore:
    """What is known before the step: the entropy, and the change that the step will make."""

    entropy: float
    predicted_change: float
    state_BS: Tensor

    def actual_change(self, policy: RefinePolicy) -> float:
        """To be asked after the step; the same states."""
        return mean_entropy(policy, self.state_BS) - self.entropy


def before_step(
    policy: RefinePolicy, state_BS: Tensor, optimizer: torch.optim.Optimizer
) -> EntropyBefore:
    """Call between clipping and `optimizer.step()`: gradients are those that the step will use."""
    twin = _double(policy)
    entropy = twin.entropy(state_BS.detach().double()).mean()
    names, parameters = zip(*twin.named_parameters(), strict=True)
    slopes = torch.autograd.grad(entropy, parameters, allow_unused=True)
    step = adamw_step(dict(policy.named_parameters()), optimizer)
    predicted = sum(
        float((slope * step[name]).sum())
        for name, slope in zip(names, slopes, strict=True)
        if slope is not None and name in step
    )
    return EntropyBefore(
        entropy=float(entropy.detach()), predicted_change=predicted, state_BS=state_BS.detach()
    )


def adamw_step(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """The change of each of these parameters that `optimizer.step()` would make now, in fp64."""
    if not isinstance(optimizer, torch.optim.AdamW):
        raise TypeError(
            f"Got {type(optimizer).__name__}, expected AdamW, whose step is rebuilt in closed form."
        )
    moving = {name: p for name, p in parameters.items() if p.grad is not None}
    if not moving:
        return {}
    name_of = {id(p): name for name, p in moving.items()}
    groups = [
        AdamGroup.of(group, names, decoupled=True)
        for group in optimizer.param_groups
        if (names := tuple(name_of[id(p)] for p in group["params"] if id(p) in name_of))
    ]
    state = {
        name: {k: v for k, v in optimizer.state[p].items() if v is not None}
        for name, p in moving.items()
        if optimizer.state.get(p)
    }
    gradient = {name: p.grad for name, p in moving.items() if p.grad is not None}
    state_before = OptimizerState(groups=tuple(groups), state=state)
    values = {name: p.detach().double() for name, p in moving.items()}
    direction = adamw_direction(values, gradient, state_before)
    return {name: state_before.lr * value for name, value in direction.total.items()}


def _double(policy: RefinePolicy) -> RefinePolicy:
    twin = copy.deepcopy(policy).double()
    for p in twin.parameters():
        p.grad = None
    return twin
