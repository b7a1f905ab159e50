"""H itself: the entropy of the policy that is probed, per token or per sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from entropy_experiments.estimate.noise import spread
from entropy_experiments.estimate.options import EstimatorOptions, LevelKeywords, measure_options
from entropy_experiments.estimate.ratio import (
    check_repeatable,
    drawn_with,
    payload,
    ratio_sums,
    score_all,
    stale_reasons,
)
from entropy_experiments.numerics.sums import by_prompt, point, whole
from entropy_experiments.types import Estimand, Estimate, Policy, Rollouts, Scores
from entropy_experiments.types.estimate import Form


def entropy_level(
    policy: Policy,
    rollouts: Rollouts,
    options: EstimatorOptions | None = None,
    *,
    form: Form | None = None,
    base: Scores | None = None,
    repackings: int = 0,
    **keywords: Unpack[LevelKeywords],
) -> Estimate:
    """H of the policy itself, with its error bar.

    Args:
        policy: Whose entropy it is.
        rollouts: Drawn from this policy.
        options: What entropy is meant, and how it is computed; None: the defaults.
        form: None is that of the options; rollouts of the policy itself may also be "resampled".
        base: Scores at theta, if they are there already.
        repackings: Passes in other packings that give the noise floor; the options' are only for
            changes, since a level is far above its noise floor.
        keywords: Other fields of `options`, which win over them.

    Returns:
        Entropy in nats per token, or per sequence.

    Examples:
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> print(entropy_level(policy, policy.draw(seed=2)))
        1.251  95% [1.226, 1.276]
    """
    options = measure_options(options, keywords)
    estimand, microbatch = options.estimand(policy), options.forward_size
    if form is not None:
        estimand = replace(estimand, form=form)
    whole(rollouts)
    check_repeatable(policy, rollouts)
    base = base or score_all(policy, policy.params, rollouts, microbatch=microbatch)

    def value_of(packed: Rollouts, size: int) -> float:
        scores = score_all(policy, policy.params, packed, microbatch=size)
        return point(_ratio, _sums(scores, packed, estimand), packed)

    here = point(_ratio, _sums(base, rollouts, estimand), rollouts)
    floor = spread(value_of, here, rollouts, microbatch, count=repackings)
    return level_of_scores(base, rollouts, estimand, noise_floor=floor)


def level_of_scores(
    base: Scores, rollouts: Rollouts, estimand: Estimand, *, noise_floor: float | None = None
) -> Estimate:
    """H of the policy that gave these scores."""
    return by_prompt(
        _ratio,
        _sums(base, rollouts, estimand),
        rollouts,
        estimand,
        noise_floor=noise_floor,
        why_not=stale_reasons(base, rollouts, estimand),
        diagnostics={"truncated": rollouts.truncated_share},
    )


def within_entropy(predicted: Estimate, level: Estimate) -> Estimate:
    """The prediction; not trusted where it is a fall by more than all the entropy there is."""
    if predicted.value >= -level.value:
        return predicted
    return predicted.doubted(
        f"it is a fall of {-predicted.value:.3g} nats, and the entropy is only {level.value:.3g}, "
        "below 0 it cannot be: the step is too long for this prediction"
    )


def _sums(scores: Scores, rollouts: Rollouts, estimand: Estimand) -> Tensor:
    moved_NS = scores.logprob_NS - drawn_with(scores, rollouts)
    return torch.stack(ratio_sums(payload(scores, estimand), moved_NS, rollouts, estimand), 1)


def _ratio(top: Tensor, bottom: Tensor) -> Tensor:
    return top / bottom
