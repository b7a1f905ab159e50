"""Bias, coverage and width of every estimator on long responses with a known truth.

The Markov policy's responses have mean length 78, a tenth of them cut at the horizon of 200, and
its entropy, slope, curvature and change are exact. Coverage is judged by an exact binomial test;
bias by a z-score; widths against t times the true spread of the estimator over the replicates.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from scipy import stats

from entropy_experiments import (
    curvature,
    entropy_level,
    first_order,
    measured_many,
    resampled,
)
from entropy_experiments.estimate.first_order import scores_along, slope_of_scores
from entropy_experiments.estimate.level import level_of_scores
from entropy_experiments.estimate.measured import change
from entropy_experiments.estimate.options import slope_estimand
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.numerics.derivatives import shifted
from entropy_experiments.types import Rollouts, Scores
from entropy_experiments.types.estimate import MIN_PROMPTS
from oracles.markov import MarkovPolicy
from tolerances import FALSE_ALARM

pytestmark = pytest.mark.statistical

ETA = 0.01
TOGETHER = 8_192
"""Rollouts of several samples that are drawn and scored in one pass."""
ALL_IN_ONE = 10_000
"""A microbatch larger than any batch: one pass, no packing."""


@dataclass(frozen=True)
class Sample:
    """Fresh rollouts, scored: at theta, along the step and after it."""

    rollouts: Rollouts
    base: Scores
    slope: Scores
    ahead: Scores

    def estimates(self, policy):
        """Every estimate by name, as the public functions make it of these rollouts."""
        found = {}
        for form in ("matched", "to_go"):
            estimand = slope_estimand(policy, form=form)
            found[form] = slope_of_scores(
                self.base, self.slope, self.rollouts, estimand, mode="jvp"
            )
            found[estimand.form] = change(self.base, self.ahead, self.rollouts, estimand)
        return {"level": level_of_scores(self.base, self.rollouts, estimand), **found}


def samples(policy, direction, prompts, per_prompt, count, *, eta=ETA):
    """`count` fresh samples. Many are drawn and scored together: a pass costs what one does."""
    size, generator = prompts * per_prompt, torch.Generator().manual_seed(0)
    moved = shifted(policy.params, direction.total, eta)
    for first in range(0, count, at_once := max(1, TOGETHER // size)):
        many = min(at_once, count - first)
        drawn = policy.draw(many * prompts, per_prompt, generator)
        base, (slope,) = scores_along(
            policy, drawn, [direction.total], mode="jvp", microbatch=ALL_IN_ONE
        )
        ahead = score_all(policy, moved, drawn, microbatch=ALL_IN_ONE)
        for rows_N in torch.arange(many * size).split(size):
            yield Sample(
                replace(drawn.take(rows_N), weight_N=None, share=1.0),
                *(Scores(*(x_NS[rows_N] for x_NS in scores)) for scores in (base, slope, ahead)),
            )


def alone(policy, direction, rollouts):
    """The same estimates by the public functions, each with passes of its own."""
    common = {"microbatch": ALL_IN_ONE, "repackings": 0}
    found = {"level": entropy_level(policy, rollouts, microbatch=ALL_IN_ONE)}
    for form in ("matched", "to_go"):
        found[form] = first_order(policy, rollouts, direction, form=form, **common)
    for form in ("snis", "per_decision"):
        (found[form],) = measured_many(
            policy, rollouts, {"v": direction}, [ETA], form=form, **common
        ).values()
    return found


@pytest.mark.parametrize(("prompts", "per_prompt"), [(8, 4), (5, 13), (32, 1)])
def test_samples_scored_together_are_those_scored_alone(prompts, per_prompt):
    """Values, intervals and trust: what holds for the many holds for the public functions."""
    policy = MarkovPolicy.random(0)
    direction = policy.direction(10)
    for sample in samples(policy, direction, prompts, per_prompt, 3):
        wanted = alone(policy, direction, sample.rollouts)
        for name, found in sample.estimates(policy).items():
            assert found.value == pytest.approx(wanted[name].value, rel=1e-9, abs=1e-12)
            assert found.interval == pytest.approx(wanted[name].interval, rel=1e-9, abs=1e-12)
            assert found.trusted == wanted[name].trusted
            assert found.estimand == wanted[name].estimand or name == "level"


def truths(policy, direction):
    level, slope, _ = policy.exact_taylor(direction)
    change = policy.exact_change(direction, ETA)
    return {
        "level": level,
        "matched": slope,
        "to_go": slope,
        "snis": change,
        "per_decision": change,
    }


def summarise(samples, truth, prompts):
    """Bias z-score, coverage, and half-width relative to the ideal, of one estimator."""
    n = len(samples)
    values = torch.tensor([s.value for s in samples], dtype=torch.float64)
    spread = float(values.std())
    out = {
        "bias_z": (float(values.mean()) - truth) / (spread / math.sqrt(n)),
        "bias_share": (float(values.mean()) - truth) / spread,
        "spread": spread,
        "refused": sum(any("k-hat" in why for why in s.why_not) for s in samples) / n,
    }
    if prompts >= MIN_PROMPTS:
        halves = torch.tensor([s.interval[1] - s.interval[0] for s in samples]) / 2
        out["coverage"] = sum(s.covers(truth) for s in samples) / n
        out["width"] = float(halves.median()) / (float(stats.t.ppf(0.975, prompts - 1)) * spread)
    return out


def check(prompts, per_prompt, replicates, *, policy_seed=0):
    policy = MarkovPolicy.random(policy_seed)
    direction = policy.direction(10 + policy_seed)
    drawn = samples(policy, direction, prompts, per_prompt, replicates)
    runs = [sample.estimates(policy) for sample in drawn]
    report = {}
    for name, truth in truths(policy, direction).items():
        estimates = [run[name] for run in runs]
        found = report[name] = summarise(estimates, truth, prompts)
        # The jackknife removes bias of order 1/N; what may be left is small beside the spread.
        assert abs(found["bias_share"]) < 4 / math.sqrt(replicates) + 0.05, (name, found)
        assert found["refused"] < 0.02, (name, found)
        if prompts < MIN_PROMPTS:
            assert all(one.interval is None and not one.trusted for one in estimates)
            continue
        covered = round(found["coverage"] * replicates)
        p_value = stats.binomtest(covered, replicates, 0.95).pvalue
        assert p_value > FALSE_ALARM, (name, found, p_value)
        assert found["width"] < 1.3, (name, found)
    print(f"\n{prompts} prompts x {per_prompt}, {replicates} replicates")
    for name, found in report.items():
        print(f"  {name:13s}", {key: round(value, 4) for key, value in found.items()})
    return report


@pytest.mark.slow
def test_coverage_of_a_small_sample():
    """N = 32 in 8 prompts, 2,000 replicates: the hardest case that still has an interval."""
    check(8, 4, 2000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "per_prompt"),
    [
        (4, 8),
        (16, 2),
        (32, 1),
        (4, 16),
        (5, 13),
        (8, 8),
        (16, 4),
        (64, 1),
        (8, 32),
        (16, 16),
        (64, 4),
    ],
)
def test_coverage(prompts, per_prompt):
    """N = 32, 64 and 256 over 4 to 64 prompts."""
    check(prompts, per_prompt, 2000)


@pytest.mark.slow
def test_coverage_of_another_policy():
    check(16, 4, 2000, policy_seed=3)


@pytest.mark.parametrize("prompts", ["population", "fixed"])
@pytest.mark.slow
def test_curvature_is_unbiased(prompts):
    """200 replicates: within 4 standard errors of the exact second derivative."""
    policy = MarkovPolicy.random(0)
    direction = policy.direction(10)
    truth = policy.exact_taylor(direction)[2]
    values = []
    for seed in range(200):
        rollouts = policy.draw(16, 4, torch.Generator().manual_seed(seed))
        found = curvature(
            policy,
            rollouts,
            direction,
            prompts=prompts,
            repackings=0,
            microbatch=ALL_IN_ONE,
        )
        values.append(found.value)
    values = torch.tensor(values, dtype=torch.float64)
    z = (float(values.mean()) - truth) / (float(values.std()) / math.sqrt(len(values)))
    assert abs(z) < 4


@pytest.mark.slow
def test_fixed_prompts_ignore_the_spread_between_prompts():
    """For a fixed set the truth is that set's own entropy, and the interval covers it."""
    policy = MarkovPolicy.random(2, spread=1.5)
    start_N = torch.tensor([1, 2, 5]).repeat_interleave(4)
    prompt_N = torch.arange(3).repeat_interleave(4)
    entropy, tokens = policy.exact(policy.params, starts=[1, 2, 5])
    truth = float(entropy / tokens)
    covered, n = 0, 1000
    for seed in range(n):
        rollouts = policy.sample(
            policy.params, start_N, prompt_N, torch.Generator().manual_seed(seed)
        )
        found = entropy_level(policy, rollouts, prompts="fixed", microbatch=ALL_IN_ONE)
        covered += found.covers(truth)
    assert stats.binomtest(covered, n, 0.95).pvalue > FALSE_ALARM, covered / n


@pytest.mark.slow
def test_resampled_agrees():
    """Fresh rollouts of the changed policy cover the exact change, and the measurement."""
    policy = MarkovPolicy.random(0)
    direction, eta, n = policy.direction(10), 0.05, 300
    truth = policy.exact_change(direction, eta)
    covered = agree = 0
    for seed in range(n):
        generator = torch.Generator().manual_seed(seed)
        start_P = torch.randint(1, policy.vocabulary, (32,), generator=generator)
        prompt_N = torch.arange(32).repeat_interleave(4)

        def sampler(params, generator, start_P=start_P, prompt_N=prompt_N):
            return policy.sample(params, start_P[prompt_N], prompt_N, generator)

        rollouts = sampler(policy.params, generator)
        fresh = resampled(
            policy,
            sampler,
            direction,
            eta,
            generator=generator,
            base_rollouts=rollouts,
            repackings=0,
            microbatch=ALL_IN_ONE,
        )
        (by_weights,) = measured_many(
            policy, rollouts, {"v": direction}, [eta], repackings=0, microbatch=ALL_IN_ONE
        ).values()
        covered += fresh.covers(truth)
        agree += (fresh - by_weights).covers(0.0)
    assert stats.binomtest(covered, n, 0.95).pvalue > FALSE_ALARM, covered / n
    assert stats.binomtest(agree, n, 0.95).pvalue > FALSE_ALARM, agree / n


def test_coverage_has_teeth():
    """Treating rollouts of a prompt as independent prompts gives intervals that miss."""
    policy = MarkovPolicy.random(2, spread=1.5, horizon=3)  # short: the prompt decides much
    truth = float(policy.exact_entropy())
    missed, n = 0, 400
    for seed in range(n):
        rollouts = policy.draw(8, 8, torch.Generator().manual_seed(seed))
        naive = replace(rollouts, prompt_N=torch.arange(len(rollouts)))
        missed += not entropy_level(policy, naive, microbatch=ALL_IN_ONE).covers(truth)
    assert stats.binomtest(n - missed, n, 0.95).pvalue < FALSE_ALARM


def coverage_if_trusted(form, eta, prompts, per_prompt, replicates):
    """(share trusted, coverage among those) at a step where the weights begin to matter."""
    policy = MarkovPolicy.random(0)
    direction = policy.direction(10)
    truth = policy.exact_change(direction, eta)
    estimand = slope_estimand(policy, form={"snis": "matched", "per_decision": "to_go"}[form])
    trusted = covered = 0
    for sample in samples(policy, direction, prompts, per_prompt, replicates, eta=eta):
        found = change(sample.base, sample.ahead, sample.rollouts, estimand)
        trusted += found.trusted
        covered += found.trusted and found.covers(truth)
    print(f"\n{form} eta {eta} {prompts}x{per_prompt}: trusted {trusted}, covered {covered}")
    return trusted / replicates, covered / max(trusted, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "per_prompt"), [(8, 4), (64, 4)])
@pytest.mark.parametrize("form", ["snis", "per_decision"])
def test_trust_protects_coverage(form, prompts, per_prompt):
    """Weights worsen with eta; what is still called trusted covers at least 9 times in 10."""
    shares = []
    for eta in (0.03, 0.06, 0.1, 0.15, 0.3):
        share, coverage = coverage_if_trusted(form, eta, prompts, per_prompt, 400)
        shares.append(share)
        if share > 0.25:  # fewer say little about coverage
            assert coverage > 0.9, (eta, share, coverage)
    assert shares[0] > 0.98, "a small step is trusted"
    assert shares[-1] < 0.25, "a huge one is not"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["matched", "to_go"])
def test_tail_check_rarely_alarms(form):
    """Ordinary slopes of 32 prompts with one rollout each: refused in at most 5 of 100."""
    policy = MarkovPolicy.random(0)
    direction = policy.direction(10)
    alarms = 0
    for sample in samples(policy, direction, 32, 1, 400):
        found = slope_of_scores(
            sample.base,
            sample.slope,
            sample.rollouts,
            slope_estimand(policy, form=form),
            mode="jvp",
        )
        alarms += not found.trusted
    assert alarms <= 20
