"""Entropy change by fresh rollouts of both policies: slow, and obviously right.

No weights, no derivative: draw from theta + eta v, draw from theta, subtract. It checks what the
others share, their sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from entropy_experiments.estimate.measured import entropy_level
from entropy_experiments.numerics.derivatives import shifted
from entropy_experiments.types import (
    Direction,
    Estimate,
    Params,
    Policy,
    Rollouts,
    Scores,
    check_direction,
)

Sampler = Callable[[Params, torch.Generator], Rollouts]
"""Draws rollouts of the policy at these parameters, for the same prompts at every call."""


def resampled(
    policy: Policy,
    sampler: Sampler,
    direction: Direction,
    eta: float,
    *,
    generator: torch.Generator,
    base: Rollouts | None = None,
    **options,
) -> Estimate:
    """H(theta + eta v) - H(theta), each on rollouts of its own policy.

    `base` are rollouts of theta, drawn here if not given; options are those of `entropy_level`.
    """
    check_direction(policy, direction)
    params = shifted(policy.params, direction.total, eta)
    before = base if base is not None else sampler(policy.params, generator)
    after = sampler(params, generator)
    for drawn in (before, after):
        if drawn.behaviour_logprob_NS is not None:
            raise ValueError(
                "The sampler gave behaviour_logprob_NS; expected rollouts drawn from the very "
                "parameters it was called with, which need no weights."
            )
    options = {**options, "form": "resampled"}
    moved = entropy_level(_At(policy, params), after, **options)
    level = entropy_level(policy, before, **options)
    found = moved - level
    truncated = {
        "truncated": float(after.truncated_N.double().mean()),
        "truncated_base": float(before.truncated_N.double().mean()),
    }
    return replace(found, diagnostics={"H": moved, "H_base": level, **truncated})


class _At:
    """A policy at other parameters."""

    def __init__(self, policy: Policy, params: Params) -> None:
        self._policy = policy
        self.params = params
        self.temperature = policy.temperature
        self.top_p = policy.top_p

    def score(self, params: Params, rollouts: Rollouts) -> Scores:
        return self._policy.score(params, rollouts)

    def support(self, params: Params, rollouts: Rollouts) -> torch.Tensor:
        return self._policy.support(params, rollouts)
