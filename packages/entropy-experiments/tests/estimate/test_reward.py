"""Expected reward against the truth: every response listed, every derivative by plain autograd."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from entropy_experiments import Estimand, Rollouts, first_order
from entropy_experiments.estimate import reward as reward_module
from entropy_experiments.estimate.reward import (
    reward_change,
    reward_curvature,
    reward_level,
    reward_slope,
    reward_slope_by_prompt,
)
from entropy_experiments.numerics.derivatives import shifted
from oracles.cases import ETAS, KINDS, arbitrary_weights, case, random_direction
from oracles.enumeration import all_rollouts, plain_scores, with_weights
from oracles.tabular import TabularPolicy
from tolerances import CENTRAL, CENTRAL_SECOND, EXACT, assert_close, assert_exact

pytestmark = pytest.mark.exact

FIXED = {"prompts": "fixed", "microbatch": 64}
QUICK = {**FIXED, "repackings": 0}
CASES = [(k, s, t) for k in KINDS for s in range(3) for t in (0.7, 1.0)]


def rewards_of(rollouts, seed=0):
    """Any number for each response: rewards need not be smooth in anything."""
    generator = torch.Generator().manual_seed(3000 + seed)
    return 2 + torch.randn(len(rollouts), generator=generator, dtype=torch.float64)


def exact_reward(policy, params, rollouts, reward_N):
    """sum over all responses of pi(response) R."""
    logp_N = plain_scores(policy, params, rollouts)[0].sum(1)
    return (logp_N.exp() / policy.prompts * reward_N).sum()


def weighted_reward(policy, params, rollouts, reward_N):
    """The snis ratio under any weights, written out."""
    new_N = plain_scores(policy, params, rollouts)[0].sum(1)
    with torch.no_grad():
        old_N = plain_scores(policy, policy.params, rollouts)[0].sum(1)
    weight_N = rollouts.weight_N * (new_N - old_N).exp()
    return (weight_N * reward_N).sum() / weight_N.sum()


def taylor(f, policy, v):
    e = torch.zeros((), dtype=torch.float64, requires_grad=True)
    value = f({name: p + e * v[name] for name, p in policy.params.items()})
    (first,) = torch.autograd.grad(value, e, create_graph=True)
    (second,) = torch.autograd.grad(first, e)
    return float(value.detach()), float(first.detach()), float(second)


@pytest.fixture(params=CASES, ids=str)
def oracle(request):
    found = case(*request.param)
    return found, rewards_of(found.rollouts, request.param[1])


@pytest.fixture
def few():
    found = case("transformer", 1, 0.7)
    return found, rewards_of(found.rollouts)


def check_truth(oracle):
    c, reward_N = oracle
    given = (c.policy, c.rollouts, reward_N)

    def at(params):
        return exact_reward(c.policy, params, c.rollouts, reward_N)

    level, slope, bend = taylor(at, c.policy, c.direction.total)
    assert_exact(reward_level(*given, **FIXED).value, level)
    assert_exact(reward_slope(*given, c.direction, **QUICK).value, slope)
    second = reward_curvature(*given, c.direction, **QUICK)
    assert_exact(second.value, bend)
    assert_exact(second.diagnostics["slope"].value, slope)
    for eta in ETAS:
        moved = {name: p + eta * c.direction.total[name] for name, p in c.policy.params.items()}
        found = reward_change(*given, c.direction, eta, **QUICK)
        assert_exact(found.value, float(at(moved) - at(c.policy.params)))
        assert_exact(float(found.diagnostics["integrand_N"].sum()), found.value)


def test_level_slope_curvature_and_change(oracle):
    check_truth(oracle)


def check_weighted(oracle):
    c, reward_N = oracle
    rollouts = arbitrary_weights(c.rollouts, 1)
    given = (c.policy, rollouts, reward_N)
    level, slope, bend = taylor(
        lambda p: weighted_reward(c.policy, p, rollouts, reward_N), c.policy, c.direction.total
    )
    assert_exact(reward_level(*given, **FIXED).value, level)
    assert_exact(reward_slope(*given, c.direction, **QUICK).value, slope)
    assert_exact(reward_curvature(*given, c.direction, **QUICK).value, bend)
    eta = 2e-5
    plus, minus = (reward_change(*given, c.direction, e, **QUICK) for e in (eta, -eta))
    assert_close((plus - minus).value / (2 * eta), slope, 1e-6)


def test_slope_is_the_derivative_of_the_change_for_any_weights(oracle):
    check_weighted(oracle)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("slope_of", lambda a, b, da, db: da / b),  # not centred: right for exact weights only
        ("slope_of", lambda a, b, da, db: -(da - a / b * db) / b),
        ("curvature_of_ratio", lambda a, b, da, db, dda, ddb: dda / b - a * ddb / b**2),
        ("logweights", lambda scores, drawn_NS, rollouts: 0 * scores.logprob_NS.sum(1)),
    ],
)
def test_the_oracle_has_teeth(monkeypatch, few, name, mutant):
    check_weighted(few)
    monkeypatch.setattr(reward_module, name, mutant)
    with pytest.raises(AssertionError, match="tolerance"):
        check_weighted(few)


@pytest.mark.parametrize("mode", ["double_backward", "central"])
def test_other_modes(few, mode):
    c, reward_N = few
    given, loose = (c.policy, c.rollouts, reward_N, c.direction), mode == "central"
    for f, tolerance in ((reward_slope, CENTRAL), (reward_curvature, CENTRAL_SECOND)):
        found, want = (f(*given, mode=m, **QUICK).value for m in (mode, "jvp"))
        assert_close(found, want, tolerance if loose else EXACT)


def test_microbatch_order_and_padding_do_not_matter(few):
    c, reward_N = few
    rows = torch.arange(0, len(c.rollouts), 4)
    rollouts, reward_N = replace(c.rollouts.take(rows), weight_N=None, share=1.0), reward_N[rows]
    order_N = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))
    packed = replace(rollouts.take(order_N).padded(2, 3), share=1.0)
    for f in (reward_slope, reward_curvature, reward_slope_by_prompt):
        one = f(c.policy, rollouts, reward_N, c.direction, prompts="fixed", repackings=2)
        two = f(c.policy, packed, reward_N[order_N], c.direction, prompts="fixed", repackings=0)
        assert one.value == pytest.approx(two.value, rel=1e-10, abs=1e-12)
        # A curvature's floor is the fourth difference of its stencil, beside the repackings.
        limit = 1e-8 if f is reward_curvature else 1e-10
        assert 0 < one.noise_floor < limit
    found = reward_change(c.policy, rollouts, reward_N, c.direction, 0.0, prompts="fixed")
    assert found.value == 0
    assert found.noise_floor < 1e-12


def test_stale_rollouts_are_reweighted(few):
    c, reward_N = few
    old = shifted(c.policy.params, c.direction.gradient, 0.2)
    with torch.no_grad():
        behaviour_NS = c.policy.score(old, c.rollouts).logprob_NS
    stale = with_weights(c.rollouts, behaviour_NS.sum(1).exp())
    stale = Rollouts(**{**vars(stale), "behaviour_logprob_NS": behaviour_NS})
    level, slope, bend = taylor(
        lambda p: exact_reward(c.policy, p, c.rollouts, reward_N), c.policy, c.direction.total
    )
    given = (c.policy, stale, reward_N)
    assert_exact(reward_level(*given, **FIXED).value, level)
    assert_exact(reward_slope(*given, c.direction, **QUICK).value, slope)
    assert_exact(reward_curvature(*given, c.direction, **QUICK).value, bend)
    there = shifted(c.policy.params, c.direction.total, 0.1)
    change = exact_reward(c.policy, there, c.rollouts, reward_N) - level
    assert_exact(reward_change(*given, c.direction, 0.1, **QUICK).value, float(change))


def two_of_each(seed):
    """Every pair of responses to one prompt, with the chance to draw it, and the true slope."""
    policy = TabularPolicy.random(seed, vocabulary=2, horizon=3, prompts=1)
    every, direction = all_rollouts(policy), random_direction(policy, seed)
    reward_N = rewards_of(every, seed)
    truth = taylor(lambda p: exact_reward(policy, p, every, reward_N), policy, direction.total)[1]
    pairs = [
        (float(every.weight_N[i] * every.weight_N[j]), torch.tensor([i, j]))
        for i, j in product(range(len(every)), repeat=2)
    ]
    return policy, every, direction, reward_N, truth, pairs


def mean_over_pairs(f, seed):
    policy, every, direction, reward_N, truth, pairs = two_of_each(seed)
    mean = 0.0
    for chance, rows in pairs:
        drawn = replace(every.take(rows), weight_N=None, share=1.0)
        found = f(policy, drawn, reward_N[rows], direction, prompts="fixed", repackings=0)
        mean += chance * found.value
    return mean, truth


@pytest.mark.parametrize("seed", range(3))
def test_slope_by_prompt_is_unbiased(seed):
    """Its mean over *all* samples of two rollouts is the true slope: no luck involved."""
    mean, truth = mean_over_pairs(reward_slope_by_prompt, seed)
    assert_exact(mean, truth)


def test_slope_by_prompt_has_teeth():
    """Centring on a mean that includes the rollout itself loses half of it at two rollouts."""
    mean, truth = mean_over_pairs(reward_slope, 0)
    assert_close(mean, truth / 2, EXACT)


def test_slope_by_prompt_is_leave_one_out():
    """The covariance written as a loop over rollouts and their prompt-mates."""
    c = case("transformer", 2, 0.7)
    rows = torch.tensor([0, 3, 5, 20, 33, 37, 50, 52])
    rollouts = replace(c.rollouts.take(rows), weight_N=None, share=1.0)
    reward_N = rewards_of(rollouts, 7)
    found = reward_slope_by_prompt(c.policy, rollouts, reward_N, c.direction, **QUICK)
    there = [shifted(c.policy.params, c.direction.total, e) for e in (1e-6, -1e-6)]
    up_N, down_N = (plain_scores(c.policy, p, rollouts)[0].sum(1) for p in there)
    slope_N = (up_N - down_N) / 2e-6
    want = 0.0
    for i in range(len(rows)):
        mates = [
            float(reward_N[j])
            for j in range(len(rows))
            if j != i and rollouts.prompt_N[j] == rollouts.prompt_N[i]
        ]
        want += float(slope_N[i]) * (float(reward_N[i]) - sum(mates) / len(mates)) / len(rows)
    assert_close(found.value, want, 1e-8)
    assert found.stderr > 0


def test_equal_rewards_change_nothing_and_say_so(few):
    c, _ = few
    reward_N = torch.full((len(c.rollouts),), 0.1)
    given = (c.policy, c.rollouts, reward_N)
    for found in (
        reward_slope(*given, c.direction, **QUICK),
        reward_slope_by_prompt(*given, c.direction, **QUICK),
        reward_curvature(*given, c.direction, **QUICK),
        reward_change(*given, c.direction, 0.1, **QUICK),
    ):
        assert found.value == 0
        assert "every evaluation rollout has the reward 0.1" in "; ".join(found.why_not)
    assert reward_level(*given, **FIXED).value == pytest.approx(0.1)


def test_missing_and_broken_rewards_are_refused(few):
    c, reward_N = few
    given = (c.policy, c.rollouts)
    with pytest.raises(ValueError, match=r"no rewards \(got None\).*Score E's own responses"):
        reward_slope(*given, None, c.direction)
    with pytest.raises(ValueError, match=r"shape \(5,\); expected \(\d+,\).*update batch's"):
        reward_slope(*given, reward_N[:5], c.direction)
    broken_N = reward_N.clone()
    broken_N[3] = float("nan")
    for f in (reward_slope, reward_slope_by_prompt, reward_curvature):
        with pytest.raises(ValueError, match=r"nan for rollout 3 \(1 of"):
            f(*given, broken_N, c.direction)
    with pytest.raises(ValueError, match="nan for rollout 3"):
        reward_level(*given, broken_N)
    with pytest.raises(ValueError, match="nan for rollout 3"):
        reward_change(*given, broken_N, c.direction, 0.1)
    with pytest.raises(ValueError, match="eta is inf"):
        reward_change(*given, reward_N, c.direction, float("inf"))


def test_a_prompt_with_one_rollout_is_refused(few):
    c, reward_N = few
    rows = torch.tensor([0, 1, len(c.rollouts) - 1])
    lonely = replace(c.rollouts.take(rows), weight_N=None, share=1.0)
    with pytest.raises(ValueError, match=r"1 prompts have one rollout \(the first is prompt 1\)"):
        reward_slope_by_prompt(c.policy, lonely, reward_N[rows], c.direction)


def test_a_huge_step_is_refused():
    c = case("tabular", 1, 1.0)
    with torch.no_grad():
        there = c.policy.score(shifted(c.policy.params, c.direction.total, 1e6), c.rollouts)
    rows = there.logprob_NS.sum(1).argsort()[:4]  # responses that the new policy never gives
    rollouts = replace(c.rollouts.take(rows), weight_N=None, share=1.0)
    with pytest.raises(ValueError, match=r"range of fp64.*smaller eta"):
        reward_change(c.policy, rollouts, rewards_of(rollouts), c.direction, 1e6, **QUICK)


def test_a_truncated_law_has_no_curvature():
    policy = TabularPolicy.random(0, top_p=0.9)
    found = case("tabular", 0, 1.0)
    reward_N = rewards_of(found.rollouts)
    with pytest.raises(ValueError, match=r"Curvature of a reward under top_p = 0.9"):
        reward_curvature(policy, found.rollouts, reward_N, found.direction)
    with pytest.raises(ValueError, match="mode='central' with top_p"):
        reward_slope(policy, found.rollouts, reward_N, found.direction, mode="central")
    stale = replace(
        found.rollouts, behaviour_logprob_NS=-torch.ones(found.rollouts.tokens_NS.shape)
    )
    with pytest.raises(ValueError, match="behaviour_logprob_NS under top_p < 1"):
        reward_change(policy, stale, reward_N, found.direction, 0.1)


def test_a_reward_is_not_an_entropy(few):
    c, reward_N = few
    slope = reward_slope(c.policy, c.rollouts, reward_N, c.direction, **QUICK)
    entropy = first_order(
        c.policy, c.rollouts, c.direction, form="matched", unit="sequence", **QUICK
    )
    with pytest.raises(ValueError, match="mean different things"):
        slope - entropy
    with pytest.raises(ValueError, match="quantity is 'energy'"):
        Estimand(quantity="energy")
