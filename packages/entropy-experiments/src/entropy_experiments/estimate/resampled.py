"""Entropy change by fresh rollouts of both policies: slow, and obviously right.

No weights, no derivative: draw from theta + eta v, draw from theta, subtract. It checks what the
others share, their sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

import torch

from entropy_experiments.estimate.level import entropy_level
from entropy_experiments.estimate.noise import REPACKINGS
from entropy_experiments.estimate.options import EstimatorOptions, LevelKeywords, measure_options
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
    base_rollouts: Rollouts | None = None,
    options: EstimatorOptions | None = None,
    repackings: int = REPACKINGS,
    **keywords: Unpack[LevelKeywords],
) -> Estimate:
    """H(theta + eta v) - H(theta), each on fresh rollouts of its own policy.

    Slow, and obviously right: it checks the others.

    Args:
        policy: Parameters before the step.
        sampler: Draws rollouts of the policy at the parameters it is called with, for the same
            prompts at every call.
        direction: v.
        eta: The learning rate.
        generator: The sampler's random numbers.
        base_rollouts: Rollouts of theta; None: drawn here.
        options: What entropy is meant, and how it is computed; None: the defaults.
        repackings: Passes in other packings that give the noise floor; 0: none is computed.
        keywords: Other fields of `options`, which win over them.

    Returns:
        The change; its diagnostics hold both levels.

    Raises:
        ValueError: If the sampler's rollouts were drawn from another policy.

    Examples:
        >>> import torch
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> rollouts = policy.draw(seed=2)
        >>> direction = Direction(parts={"gradient": {"table": torch.eye(5).double()}}, lr=0.1)
        >>> def sampler(params, generator):
        ...     return policy.draw(seed=generator.initial_seed(), params=params)
        >>> generator = torch.Generator().manual_seed(3)
        >>> print(resampled(policy, sampler, direction, 0.1, generator=generator))
        0.0045  95% [0.003255, 0.005744]
    """
    check_direction(policy, direction)
    params = shifted(policy.params, direction.total, eta)
    before = sampler(policy.params, generator) if base_rollouts is None else base_rollouts
    after = sampler(params, generator)
    for drawn in (before, after):
        if drawn.behaviour_logprob_NS is not None:
            raise ValueError(
                "The sampler gave behaviour_logprob_NS; expected rollouts drawn from the very "
                "parameters it was called with, which need no weights."
            )
    options = measure_options(options, keywords)
    moved, level = (
        entropy_level(at, drawn, options, form="resampled", repackings=repackings)
        for at, drawn in ((_At(policy, params), after), (policy, before))
    )
    found = moved - level
    return replace(found, diagnostics={"H": moved, "H_base": level})


class _At:
    """A policy at other parameters."""

    def __init__(self, policy: Policy, params: Params) -> None:
        self._policy = policy
        self.params = params
        self.temperature = policy.temperature
        self.top_p = policy.top_p

    def score(self, params: Params, rollouts: Rollouts) -> Scores:
        return self._policy.score(params, rollouts)
