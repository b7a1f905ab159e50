"""Random enumerable policies with a direction, and everything true about them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from entropy_experiments.types import Direction, Rollouts
from oracles.enumeration import all_rollouts, exact_change, exact_taylor, with_weights
from oracles.tabular import TabularPolicy
from oracles.transformer import TransformerPolicy

SEEDS = range(20)
TEMPERATURES = (0.7, 1.0)
ETAS = (1e-3, 1e-2, 0.1, 0.3)
UNITS = ("token", "sequence")
KINDS = {"tabular": TabularPolicy.random, "transformer": TransformerPolicy}


@dataclass(frozen=True)
class Case:
    policy: Any
    rollouts: Rollouts
    direction: Direction
    taylor: dict[str, tuple[float, float, float]]
    """H, slope and curvature, by unit."""
    change: dict[tuple[str, float], float]
    """H(theta + eta v) - H(theta), by unit and eta."""


@cache
def case(kind: str, seed: int, temperature: float) -> Case:
    policy = KINDS[kind](seed, temperature=temperature)
    direction = random_direction(policy, seed)
    v = direction.total
    return Case(
        policy=policy,
        rollouts=all_rollouts(policy),
        direction=direction,
        taylor={unit: exact_taylor(policy, policy.params, v, unit=unit) for unit in UNITS},
        change={
            (unit, eta): exact_change(policy, policy.params, v, eta, unit=unit)
            for unit in UNITS
            for eta in ETAS
        },
    )


def random_direction(policy: Any, seed: int, *, size: float = 0.3) -> Direction:
    """Three parts, as an optimizer's step has."""
    generator = torch.Generator().manual_seed(1000 + seed)
    parts = {
        part: {
            name: size * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            for name, p in policy.params.items()
        }
        for part in ("momentum", "decay", "gradient")
    }
    return Direction(parts=parts, lr=0.01)


def arbitrary_weights(rollouts: Rollouts, seed: int) -> Rollouts:
    """The same rollouts under weights that are nobody's probabilities."""
    generator = torch.Generator().manual_seed(2000 + seed)
    weight_N = torch.rand(len(rollouts), generator=generator, dtype=torch.float64) + 0.05
    return with_weights(rollouts, weight_N)
