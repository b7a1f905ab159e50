"""J v: how fast the scores change along directions. (J^T c is `estimate.gradient`.)

J is what reverse mode says it is. Forward mode agrees, also where the model holds something
constant on purpose (DoRA as it is trained detaches its norms; a tangent does not pass a detach
either). Differences, for models without forward mode, cannot know; and how far to step depends on
the model: an Adam direction may have a few huge elements. So their step is the one that agrees
best with reverse mode on a few rollouts, and no agreement is an error. A model cut over ranks has
nothing but differences: there, no agreement is a doubt that the result carries.

    two forwards   D(h) = [f(theta + h v) - f(theta - h v)] / 2h
    four           [4 D(h) - D(2h)] / 3, where two do not reach TWO_SUFFICE

Steps tried are SCALES, and the one that goes about as far as the optimizer's step does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from entropy_experiments.distributed import current
from entropy_experiments.estimate.gradient import weighted_gradient
from entropy_experiments.estimate.modes import cut_over_ranks
from entropy_experiments.estimate.ratio import check_scores, no_scores
from entropy_experiments.numerics.derivatives import (
    How,
    central_step,
    difference_step,
    dot,
    norm,
    pushforward,
    pushforwards,
    shifted,
)
from entropy_experiments.types import Params, Policy, Rollouts, Scores

SCALES = tuple(0.05 * 2**j for j in range(6))
"""Steps tried, in units of `central_step`: networks bend on a shorter scale than their norm."""
TWO_SUFFICE = 5e-4
AGREEMENT = 0.01
"""Of the norm of the slopes: in fp32 differences reach 1e-3, for DoRA they miss by 0.06."""
ROUNDING = 16
"""Of a score, in units of eps: all that differences see of tokens that are nearly certain."""
TOGETHER = 4
"""Directions per forward by jvp: each keeps derivatives of all activations."""
PROBES = 4
PROBED_ROLLOUTS = 12
"""Few rollouts can be straight where others, with a token that the direction throws far, bend."""


class Differences(NamedTuple):
    """How J v is taken from plain forwards."""

    step: float
    forwards: int
    length: float = 0.0
    """How far either of the nearest points is from theta."""
    gap: float = 0.0
    """Between these differences and reverse mode on a few rollouts, relative."""
    doubt: str = ""
    """Why they are not to be trusted, where a model has nothing better."""

    def __call__(self, policy: Policy, part: Rollouts, v: Params) -> Scores:
        near = _difference(policy, part, v, self.step)
        if self.forwards == 2:
            return near
        return _extrapolated(near, _difference(policy, part, v, 2 * self.step))


class ScoreSlopes(NamedTuple):
    """Of every token, in fp64."""

    scores: Scores | None
    """[N, S], where they come for free (not by central)."""
    slope_K: Scores
    """[K, N, S]: D_v of them along each direction."""
    differences: tuple[Differences, ...]
    """By central: how each direction's slopes were taken."""


def score_slopes(
    policy: Policy,
    rollouts: Rollouts,
    many: Sequence[Params],
    *,
    mode: How,
    microbatch: int,
    reach: float | None = None,
) -> ScoreSlopes:
    """The scores' slopes along each of `many` directions.

    By jvp, TOGETHER directions share a forward: the derivatives alone are computed K times. By
    central, `reach` is the length of the optimizer's step: see `chosen_differences`.
    """
    ranks = current()
    differences = [
        chosen_differences(policy, rollouts, v, microbatch=microbatch, reach=reach)
        for v in many
        if mode == "central"
    ]

    def of_part(part: Rollouts) -> tuple[Scores | None, list[Scores]]:
        if mode == "central":
            return None, [take(policy, part, v) for take, v in zip(differences, many, strict=True)]
        here, along = None, []
        together = TOGETHER if mode == "jvp" else 1
        for start in range(0, len(many), together):
            some = many[start : start + together]

            def score(p: Params) -> Scores:
                return policy.score(p, part)

            if mode == "jvp":
                here, slopes = pushforwards(score, policy.params, some)
            else:
                here, slope = pushforward(score, policy.params, some[0], how=mode)
                slopes = [slope]
            along += slopes
        return here, along

    def local() -> list[Tensor]:
        seen, *slopes = (no_scores(rollouts) for _ in range(1 + len(many)))
        for rows_N, columns, part in ranks.shard(rollouts.split(microbatch, policy)):
            here, along = of_part(part)
            if here is not None:
                _put(seen, check_scores(here, part, rows_N, columns), part, rows_N, columns)
            for into, slope in zip(slopes, along, strict=True):
                _put(into, check_scores(slope, part, rows_N, columns), part, rows_N, columns)
        return [*seen, *(torch.stack(x_K) for x_K in zip(*slopes, strict=True))]

    logprob_NS, entropy_NS, *slope_K = ranks.all_reduce(local)
    seen = None if mode == "central" else Scores(logprob_NS, entropy_NS)
    return ScoreSlopes(seen, Scores(*slope_K), tuple(differences))


def chosen_differences(
    policy: Policy,
    rollouts: Rollouts,
    v: Params,
    *,
    microbatch: int = 8,
    reach: float | None = None,
) -> Differences:
    """The step whose differences agree best with reverse mode, in random combinations.

    `reach`: how far the optimizer's step goes; differences about as wide are tried, too.
    """
    part = _some(rollouts)
    unit, along = central_step(policy.params, v, power=1 / 3), norm(v)
    steps = [unit * scale for scale in SCALES]
    if reach is not None and along > 0:
        steps.append(difference_step(policy.params, v, reach / along))
    tried = list(zip(steps, _tried_steps(policy, part, v, steps, microbatch), strict=True))
    generator = torch.Generator().manual_seed(0)
    cotangents = [
        Scores(*(torch.randn(x_NS.shape, generator=generator).to(x_NS) for x_NS in tried[0][1]))
        for _ in range(PROBES)
    ]
    exact_Q = torch.tensor(
        [dot(weighted_gradient(policy, part, w, microbatch=microbatch), v) for w in cotangents],
        dtype=torch.float64,
    )

    def judged(slopes: Scores, step: float, forwards: int) -> tuple[float, float, Differences]:
        size = float(sum((x_NS**2).sum() for x_NS in slopes)) ** 0.5
        found_Q = [
            float(sum((w * x).sum() for w, x in zip(cotangent, slopes))) for cotangent in cotangents
        ]
        gap = float((torch.tensor(found_Q, dtype=torch.float64) - exact_Q).norm()) / PROBES**0.5
        return gap, max(size, float(exact_Q.norm()) / PROBES**0.5), Differences(step, forwards)

    two = [judged(slopes, step, 2) for step, slopes in tried]
    doubled = pairwise(tried[: len(SCALES)])
    four = [judged(_extrapolated(near, far), step, 4) for (step, near), (_, far) in doubled]
    gap, size, best = min(two, key=lambda found: found[0])
    if gap > TWO_SUFFICE * size:
        gap, size, best = min([*two, *four], key=lambda found: found[0])
    eps = max(torch.finfo(theta.dtype).eps for theta in policy.params.values())
    noise = ROUNDING * eps / best.step * float(part.tokens_N.sum()) ** 0.5
    best = best._replace(length=best.step * along, gap=gap / size if size else 0.0)
    if gap <= AGREEMENT * size + noise:
        return best
    apart = (
        f"differences of the scores are {gap / size:.2g} (relative) away from what the gradient "
        f"says; expected at most {AGREEMENT:g}. Training may hold constant what differences move "
        "(DoRA's norms), the stencil crosses a switch of experts, or the precision is too low for "
        "differences"
    )
    if cut_over_ranks(policy):
        return best._replace(doubt=apart)
    raise ValueError(f"mode='central': {apart}: use mode='auto' (predict.method: auto).")


def _tried_steps(
    policy: Policy, part: Rollouts, v: Params, steps: Sequence[float], microbatch: int
) -> list[Scores]:
    """Differences over each step. Ranks share out the rollouts, not the steps: a pass of a model
    that is cut over them is made by all at once, hence at the same parameters."""
    ranks = current()

    def local() -> list[Tensor]:
        out = [no_scores(part) for _ in steps]
        for rows_N, columns, few in ranks.shard(part.split(microbatch, policy)):
            for into, step in zip(out, steps, strict=True):
                _put(into, _difference(policy, few, v, step), few, rows_N, columns)
        return [x_NS for slopes in out for x_NS in slopes]

    sums = ranks.all_reduce(local)
    return [Scores(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]


def inside(x_NS: Tensor, mask_NS: Tensor) -> Tensor:
    """fp64 where the mask is, zero elsewhere whatever stood there."""
    return torch.where(mask_NS, x_NS.double(), 0.0)


def _difference(policy: Policy, part: Rollouts, v: Params, step: float) -> Scores:
    with torch.no_grad():
        plus, minus = (policy.score(shifted(policy.params, v, c * step), part) for c in (1, -1))
    return Scores(
        *(
            inside((a.double() - b.double()) / (2 * step), part.response_NS)
            for a, b in zip(plus, minus)
        )
    )


def _extrapolated(near: Scores, far: Scores) -> Scores:
    return Scores(*((4 * a_NS - b_NS) / 3 for a_NS, b_NS in zip(near, far, strict=True)))


def _some(rollouts: Rollouts) -> Rollouts:
    """A few rollouts, from short to long."""
    order_N = torch.argsort(rollouts.attention_NS.sum(1), stable=True)
    picked = torch.linspace(0, len(order_N) - 1, min(PROBED_ROLLOUTS, len(order_N))).long()
    few = rollouts.take(order_N[picked.to(order_N.device)])
    ((_, _, part),) = few.split(len(few))
    return part


def _put(out: Scores, found: Scores, part: Rollouts, rows_N: Tensor, columns: slice) -> None:
    for whole_NS, part_NS in zip(out, found, strict=True):
        whole_NS[rows_N, columns] = inside(part_NS, part.response_NS)
