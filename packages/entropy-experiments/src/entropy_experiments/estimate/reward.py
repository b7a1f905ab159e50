"""Expected reward: the same numbers as for entropy, from the rewards of E's own rollouts.

    R = sum_i W_i R_i / sum_i W_i,    W_i = w_i exp(S_i - S_i as drawn)
    slope   sum_i W_i (R_i - R) D S_i / sum_i W_i        the derivative of the measured change
    by prompt   sum_p W_p cov_p(R, D S),  cov_p the unbiased covariance among p's rollouts

A reward belongs to a whole response, so there is no per-decision form. The slope by prompt stands
beside the other, never in a difference with the measurement: a score has mean 0 given the prompt,
so centring on the prompt's *other* rollouts (which is what dividing by n - 1 does) leaves the
expectation and removes the spread between easy and hard prompts.

Never the rewards of the update batch: they made the step, and along a step its own batch's reward
rises by construction (g.Pg >= 0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from typing import Unpack

import torch
from torch import Tensor

from entropy_experiments.estimate.central import led_by_reverse, slope_by_reverse
from entropy_experiments.estimate.measured import MAX_STEP_ROUNDING
from entropy_experiments.estimate.modes import used_forward_mode
from entropy_experiments.estimate.noise import repackings_of
from entropy_experiments.estimate.options import (
    EstimatorOptions,
    RewardKeywords,
    reward_options,
)
from entropy_experiments.estimate.ratio import (
    check_repeatable,
    drawn_with,
    refuse_unmoved,
    score_all,
    stale_reasons,
)
from entropy_experiments.estimate.reward_sums import (
    change_of,
    covariances,
    level_of,
    logweights,
    logweights_here,
    matched,
    rollout_slopes,
    second_order_sums,
    slope_of,
    weighted,
)
from entropy_experiments.estimate.several_directions import step_rounding
from entropy_experiments.estimate.stencil import (
    curvature_of_ratio,
    direction_step,
    doubted,
    stencil_of,
)
from entropy_experiments.estimate.support import Support
from entropy_experiments.numerics.derivatives import How, shifted
from entropy_experiments.numerics.sums import Statistic, by_prompt, point, whole
from entropy_experiments.numerics.weights import diagnose
from entropy_experiments.types import (
    Direction,
    Estimand,
    Estimate,
    Policy,
    Rollouts,
    Scores,
    check_direction,
)
from entropy_experiments.types.estimate import Prompts


def reward_level(
    policy: Policy,
    rollouts: Rollouts,
    reward_N: Tensor | None,
    options: EstimatorOptions | None = None,
    *,
    base: Scores | None = None,
    **keywords: Unpack[RewardKeywords],
) -> Estimate:
    """R of the policy itself; scores are needed for stale rollouts only.

    Keywords are fields of `options`, and win over them.
    """
    reward_N = check_rewards(reward_N, rollouts)
    options = reward_options(options, keywords)
    estimand = reward_estimand(policy, prompts=options.prompts, horizon=options.horizon)
    base = _base_if_stale(policy, rollouts, base, options.forward_size)
    return by_prompt(
        level_of,
        torch.stack(weighted(reward_N, logweights_here(base, rollouts)), 1),
        rollouts,
        estimand,
        why_not=stale_reasons(base, rollouts, estimand),
        diagnostics={"truncated": rollouts.truncated_share},
    )


def reward_slope(
    policy: Policy,
    rollouts: Rollouts,
    reward_N: Tensor | None,
    direction: Direction,
    options: EstimatorOptions | None = None,
    *,
    within_prompts: bool = False,
    base: Scores | None = None,
    slope_N: Tensor | None = None,
    **keywords: Unpack[RewardKeywords],
) -> Estimate:
    """D_v R per unit learning rate: the derivative of `reward_change` on these very rollouts.

    `slope_N`, D_v S of every rollout, spares the pass (and then has no noise floor of its own).
    Keywords are fields of `options`, and win over them.
    """
    options = reward_options(options, keywords)
    microbatch = options.microbatch
    reward_N = _checked(policy, rollouts, reward_N, direction)
    if slope_N is not None and slope_N.shape != reward_N.shape:
        raise ValueError(
            f"slope_N has shape {tuple(slope_N.shape)}; expected {tuple(reward_N.shape)}, D_v S "
            "of every evaluation rollout."
        )
    how: How = "jvp" if slope_N is not None else used_forward_mode(policy, rollouts, options.mode)
    if how == "central" and policy.top_p < 1:
        raise ValueError(
            f"mode='central' with top_p = {policy.top_p:g}: a difference would step over changes "
            "of the truncated distribution's support. Use mode='jvp', which keeps the support."
        )
    estimand = reward_estimand(policy, prompts=options.prompts, horizon=options.horizon)
    v = direction.total
    base = _base_if_stale(policy, rollouts, base, microbatch)
    columns, statistic = (covariances, level_of) if within_prompts else (matched, slope_of)

    def sums_of(packed: Rollouts, paid_N: Tensor, size: int) -> Tensor:
        if slope_N is not None:
            here_N = logweights_here(base, rollouts)
            return columns(paid_N, here_N, slope_N.to(here_N), rollouts)
        logweight_N, found_N = rollout_slopes(policy, packed, v, how, size, direction.lr)
        if not found_N.any():
            refuse_unmoved(policy, packed, v)
        return columns(paid_N, logweight_N, found_N, packed)

    repackings = 0 if slope_N is not None else options.repackings
    doubts = (*stale_reasons(base, rollouts, estimand), *_equal(reward_N))
    lowered_N = _lowered(reward_N)
    slope, _ = _estimate(
        sums_of, statistic, rollouts, lowered_N, estimand, microbatch, repackings, doubts
    )
    if slope_N is not None:
        return slope
    if how == "central":
        here_N = logweights_here(base, rollouts)
        exact = slope_by_reverse(
            policy,
            rollouts,
            v,
            statistic,
            lambda slope_N: columns(lowered_N, here_N, slope_N, rollouts),
            microbatch=microbatch,
        )
        slope = led_by_reverse(slope, slope.value, exact)
    return replace(slope, diagnostics={**slope.diagnostics, "mode": how})


def reward_slope_by_prompt(
    policy: Policy,
    rollouts: Rollouts,
    reward_N: Tensor | None,
    direction: Direction,
    options: EstimatorOptions | None = None,
    *,
    base: Scores | None = None,
    slope_N: Tensor | None = None,
    **keywords: Unpack[RewardKeywords],
) -> Estimate:
    """D_v R with less variance, from comparisons within prompts: unbiased for fresh rollouts.

    Options are those of `reward_slope`.
    """
    lonely = single_prompts(rollouts)
    if lonely:
        raise ValueError(
            f"{len(lonely)} prompts have one rollout (the first is prompt {lonely[0]}); a slope "
            "by prompt compares rollouts of the same prompt and needs two or more of each. Draw "
            "more, or use reward_slope."
        )
    return reward_slope(
        policy,
        rollouts,
        reward_N,
        direction,
        options,
        within_prompts=True,
        base=base,
        slope_N=slope_N,
        **keywords,
    )


def reward_curvature(
    policy: Policy,
    rollouts: Rollouts,
    reward_N: Tensor | None,
    direction: Direction,
    options: EstimatorOptions | None = None,
    **keywords: Unpack[RewardKeywords],
) -> Estimate:
    """D_v D_v R; diagnostics: `slope`, an Estimate from the same pass.

    Keywords are fields of `options`, and win over them.
    """
    options = reward_options(options, keywords)
    microbatch, repackings = options.microbatch, options.repackings
    reward_N = _checked(policy, rollouts, reward_N, direction)
    if policy.top_p < 1:
        raise ValueError(
            f"Curvature of a reward under top_p = {policy.top_p:g}: the differences it is made of "
            "would step over changes of the support. It is defined for top_p = 1."
        )
    estimand = reward_estimand(policy, prompts=options.prompts, horizon=options.horizon)
    base = _base_if_stale(policy, rollouts, None, microbatch)
    how, v = used_forward_mode(policy, rollouts, options.mode), direction.total
    step = direction_step(policy, direction, how)

    def sums_of(packed: Rollouts, paid_N: Tensor, size: int) -> Tensor:
        return second_order_sums(policy, packed, paid_N, v, how, size, step)

    def curvature_of(*columns: Tensor) -> Tensor:
        return curvature_of_ratio(*columns[:6])

    doubts = (*stale_reasons(base, rollouts, estimand), *_equal(reward_N))
    bend, sums_NM = _estimate(
        sums_of,
        curvature_of,
        rollouts,
        _lowered(reward_N),
        estimand,
        microbatch,
        repackings,
        doubts,
        rounding_of=lambda sums_NM: stencil_of(sums_NM, rollouts, step / direction.lr).rounding,
    )
    bend = doubted(bend, stencil_of(sums_NM, rollouts, step / direction.lr))
    slope = by_prompt(slope_of, sums_NM[:, :4], rollouts, estimand, why_not=doubts, check_tail=True)
    if how == "central":
        paid_N, here_N = _lowered(reward_N), logweights_here(base, rollouts)
        exact = slope_by_reverse(
            policy,
            rollouts,
            v,
            slope_of,
            lambda slope_N: matched(paid_N, here_N, slope_N, rollouts),
            microbatch=microbatch,
        )
        slope = led_by_reverse(slope, slope.value, exact)
    return replace(bend, diagnostics={**bend.diagnostics, "mode": how, "slope": slope})


def reward_change(
    policy: Policy,
    rollouts: Rollouts,
    reward_N: Tensor | None,
    direction: Direction,
    eta: float,
    options: EstimatorOptions | None = None,
    *,
    clip: float | None = None,
    base: Scores | None = None,
    moved: Scores | None = None,
    **keywords: Unpack[RewardKeywords],
) -> Estimate:
    """R(theta + eta v) - R(theta) by reweighting; `moved`, scores there, spares a pass.

    Diagnostics: `weights` and, per rollout, `integrand_N` (they sum to the change). Keywords are
    fields of `options`, and win over them.
    """
    options = reward_options(options, keywords)
    microbatch, repackings = options.forward_size, options.repackings
    reward_N = _checked(policy, rollouts, reward_N, direction)
    if not isfinite(eta):
        raise ValueError(f"eta is {eta}; expected a finite number.")
    if rollouts.behaviour_logprob_NS is not None and policy.top_p < 1:
        raise ValueError(
            "Rollouts with behaviour_logprob_NS under top_p < 1: their support may differ from "
            "the policy's, and no weight repairs that. Draw them from the policy itself."
        )
    estimand = reward_estimand(policy, prompts=options.prompts, horizon=options.horizon)
    total = direction.total
    params = shifted(policy.params, total, eta)
    rounding = step_rounding(policy.params, params, total, eta)
    Support(policy, rollouts, microbatch).refuse_if_moved(params, eta)
    base = base or score_all(policy, policy.params, rollouts, microbatch=microbatch)
    moved = moved or score_all(policy, params, rollouts, microbatch=microbatch)
    if eta and rounding < 0.5 and torch.equal(moved.logprob_NS, base.logprob_NS):
        refuse_unmoved(policy, rollouts, total)

    drawn_NS = drawn_with(base, rollouts)

    def sums_of(there: Scores, paid_N: Tensor) -> Tensor:
        weights = (logweights(scores, drawn_NS, rollouts) for scores in (there, base))
        return torch.stack([x_N for w_N in weights for x_N in weighted(paid_N, w_N, clip)], 1)

    lowered_N = _lowered(reward_N)
    sums_N4 = sums_of(moved, lowered_N)
    weight_N1 = rollouts.weight_N[:, None]
    if not (bool(torch.isfinite(sums_N4).all()) and float((weight_N1 * sums_N4)[:, 1].sum()) > 0):
        low, high = (float(x) for x in logweights(moved, drawn_NS, rollouts).aminmax())
        raise ValueError(
            f"Importance weights leave the range of fp64: log-weights from {low:.4g} to "
            f"{high:.4g}. The step is far outside what these rollouts can speak for: take a "
            "smaller eta."
        )
    floors = []
    for packing in repackings_of(rollouts, microbatch, count=repackings):
        again = score_all(policy, policy.params, packing.rollouts, microbatch=packing.microbatch)
        again = Scores(*(packing.restored(x_NS) for x_NS in again))
        floors.append(point(change_of, sums_of(again, lowered_N), rollouts) ** 2)
    weights = diagnose(moved.logprob_NS - drawn_NS, rollouts, per_decision=False, clip=clip)
    doubts = [*weights.why_not, *_equal(reward_N)]
    if rounding > MAX_STEP_ROUNDING:
        doubts.append(
            f"{rounding:.0%} of the step is lost when theta + eta v is stored: the parameters' "
            "dtype is too coarse for this eta"
        )
    new_top_N, new_N, old_top_N, old_N = (weight_N1 * sums_of(moved, reward_N)).unbind(1)
    return by_prompt(
        change_of,
        sums_N4,
        rollouts,
        estimand,
        noise_floor=(sum(floors) / len(floors)) ** 0.5 if floors else None,
        why_not=doubts,
        diagnostics={
            "weights": weights,
            "step_rounding": rounding,
            "clip": clip,
            "integrand_N": new_top_N / new_N.sum() - old_top_N / old_N.sum(),
            "truncated": rollouts.truncated_share,
        },
    )


def reward_estimand(
    policy: Policy, *, prompts: Prompts = "population", horizon: int | None = None
) -> Estimand:
    return Estimand(
        prompts=prompts,
        temperature=policy.temperature,
        top_p=policy.top_p,
        horizon=horizon,
        unit="sequence",
        form="snis",
        quantity="reward",
    )


def check_rewards(reward_N: Tensor | None, rollouts: Rollouts) -> Tensor:
    """The rewards in fp64, one for each of E's rollouts."""
    whole(rollouts)
    if reward_N is None:
        raise ValueError(
            "The evaluation rollouts have no rewards (got None); expected reward_N, one number "
            "per evaluation rollout. Score E's own responses; the update batch's rewards cannot "
            "stand in for them."
        )
    if tuple(reward_N.shape) != (len(rollouts),):
        raise ValueError(
            f"reward_N has shape {tuple(reward_N.shape)}; expected ({len(rollouts)},), one reward "
            "per evaluation rollout. Were the update batch's rewards passed?"
        )
    reward_N = reward_N.detach().to(rollouts.weight_N)
    bad_N = ~torch.isfinite(reward_N)
    if bad_N.any():
        row = int(bad_N.nonzero()[0])
        raise ValueError(
            f"reward_N is {float(reward_N[row])} for rollout {row} ({int(bad_N.sum())} of "
            f"{len(bad_N)} are not finite); expected finite rewards. Score these responses, or "
            "give them the reward that training would."
        )
    return reward_N


def single_prompts(rollouts: Rollouts) -> list[int]:
    """Prompts with only one rollout (of any weight)."""
    whole(rollouts)
    prompt_P, count_P = torch.unique(rollouts.prompt_N[rollouts.weight_N > 0], return_counts=True)
    return prompt_P[count_P < 2].tolist()


def _checked(
    policy: Policy, rollouts: Rollouts, reward_N: Tensor | None, direction: Direction
) -> Tensor:
    reward_N = check_rewards(reward_N, rollouts)
    check_direction(policy, direction)
    check_repeatable(policy, rollouts)
    return reward_N


def _base_if_stale(
    policy: Policy, rollouts: Rollouts, base: Scores | None, microbatch: int
) -> Scores | None:
    if rollouts.behaviour_logprob_NS is None:
        return None
    return base or score_all(policy, policy.params, rollouts, microbatch=microbatch)


def _estimate(
    sums_of: Callable[[Rollouts, Tensor, int], Tensor],
    statistic: Statistic,
    rollouts: Rollouts,
    reward_N: Tensor,
    estimand: Estimand,
    microbatch: int,
    repackings: int,
    doubts: tuple[str, ...],
    rounding_of: Callable[[Tensor], float] | None = None,
) -> tuple[Estimate, Tensor]:
    """A statistic of per-rollout sums with its noise floor, and the sums.

    `rounding_of`: what the sums themselves say about their rounding.
    """
    sums_NM = sums_of(rollouts, reward_N, microbatch)
    here = point(statistic, sums_NM, rollouts)
    squares = [
        (point(statistic, sums_of(p.rollouts, reward_N[p.rows_N], p.microbatch), p.rollouts) - here)
        ** 2
        for p in repackings_of(rollouts, microbatch, count=repackings)
    ]
    floors = [(sum(squares) / len(squares)) ** 0.5] if squares else []
    floors += [] if rounding_of is None else [rounding_of(sums_NM)]
    estimate = by_prompt(
        statistic,
        sums_NM,
        rollouts,
        estimand,
        noise_floor=max(floors, default=None),
        diagnostics={"truncated": rollouts.truncated_share},
        why_not=doubts,
        check_tail=True,
    )
    return estimate, sums_NM


def _lowered(reward_N: Tensor) -> Tensor:
    """A change does not see a constant; without it equal rewards change by exactly 0."""
    return reward_N - reward_N.min()


def _equal(reward_N: Tensor) -> tuple[str, ...]:
    if bool((reward_N != reward_N[0]).any()):
        return ()
    return (
        f"every evaluation rollout has the reward {float(reward_N[0]):g}: nothing shows which "
        "responses are better",
    )
