"""Scores at theta + eta v, for several directions and step sizes (influence.directions_per_pass).

A chunk of parameter settings is in memory at a time, and the rollouts' microbatches are gone
through once for each chunk: every setting's pass over a microbatch is a pass of its own, so chunks
change no number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from entropy_experiments.distributed import local_part
from entropy_experiments.estimate.ratio import refuse_unmoved, score_each
from entropy_experiments.estimate.support import Support
from entropy_experiments.numerics.derivatives import (
    in_cache,
    norm,
    over_shards,
    shifted,
    square_sum,
)
from entropy_experiments.types import Params, Policy, Rollouts, Scores

Key = TypeVar("Key", int, str)


class Moved(NamedTuple, Generic[Key]):
    """Scores at theta + eta v, and the share of the step that rounding took."""

    key: Key
    eta: float
    scores: Scores
    rounding: float


def moved_scores(
    policy: Policy,
    rollouts: Rollouts,
    along: Mapping[Key, Callable[[], Params]],
    etas: Sequence[float],
    *,
    base: Scores,
    microbatch: int,
    chunk: int = 1,
) -> Iterator[Moved[Key]]:
    """Every direction at every eta; `chunk` parameter settings are in memory at a time.

    Refused: steps that move a top-p support, and scores that follow no step at all.
    """
    support = Support(policy, rollouts, microbatch)
    cases = [(key, eta) for key in along for eta in etas]
    for start in range(0, len(cases), chunk):
        some = cases[start : start + chunk]
        directions = {key: along[key]() for key in dict.fromkeys(key for key, _ in some)}
        # A generator of its own: its settings are gone before the next chunk's are made.
        yield from _moved(policy, rollouts, directions, some, support, base, microbatch)


def _moved(
    policy: Policy,
    rollouts: Rollouts,
    directions: Mapping[Key, Params],
    cases: Sequence[tuple[Key, float]],
    support: Support,
    base: Scores,
    microbatch: int,
) -> Iterator[Moved[Key]]:
    settings = [shifted(policy.params, directions[key], eta) for key, eta in cases]
    for (_, eta), params in zip(cases, settings, strict=True):
        support.refuse_if_moved(params, eta)
    scores_of_settings = score_each(policy, settings, rollouts, microbatch=microbatch)
    for (key, eta), params, scores in zip(cases, settings, scores_of_settings, strict=True):
        v = directions[key]
        rounding = step_rounding(policy.params, params, v, eta)
        if eta and rounding < 0.5 and torch.equal(scores.logprob_NS, base.logprob_NS):
            refuse_unmoved(policy, rollouts, v)
        yield Moved(key, eta, scores, rounding)


def step_rounding(before: Params, after: Params, v: Params, eta: float) -> float:
    """Share of eta v that stored parameters do not show: |after - before - eta v| / |eta v|."""
    size = abs(eta) * norm(v)
    if not size:
        return 0.0
    lost = 0.0
    for name, theta in before.items():
        for old, new, along in in_cache(*map(local_part, (theta, after[name], v[name]))):
            lost += square_sum(_missed(old, new, along, eta))
    return over_shards(lost, before) ** 0.5 / size


def _missed(old: Tensor, new: Tensor, along: Tensor, eta: float) -> Tensor:
    """new - old - eta v in the parameters' precision: of the step it errs by a last digit."""
    dtype = torch.promote_types(old.dtype, torch.float32)
    return (new.to(dtype) - old.to(dtype)).sub_(along.to(dtype), alpha=eta)
