"""Every estimator against the truth, on policies small enough to list all they can say.

The rollouts are *every* response, weighted by its probability, so an estimator's average is the
true expectation: agreement is to rounding, and there is no seed to tune.
"""

import pytest
import torch

from entropy_experiments import (
    Rollouts,
    curvature,
    entropy_level,
    first_order,
    first_order_by_part,
    measured_many,
    odd_and_even,
    resampled,
)
from entropy_experiments.estimate.measured import Case as Measurement
from oracles.cases import ETAS, KINDS, SEEDS, TEMPERATURES, UNITS, case
from oracles.enumeration import all_rollouts, exact_slope, with_weights
from tolerances import CENTRAL, CENTRAL_SECOND, EXACT, assert_close, assert_exact

pytestmark = pytest.mark.exact

FORMS = ("matched", "to_go")
FIXED = {"prompts": "fixed", "microbatch": 64}
QUICK = {**FIXED, "repackings": 0}


@pytest.fixture(params=[(k, s, t) for k in KINDS for s in SEEDS for t in TEMPERATURES], ids=str)
def oracle(request):
    return case(*request.param)


@pytest.fixture(params=[(k, s, 0.7) for k in KINDS for s in range(3)], ids=str)
def few(request):
    """Enough for what does not depend on luck."""
    return case(*request.param)


@pytest.mark.parametrize("unit", UNITS)
def test_level(oracle, unit):
    for form in ("snis", "per_decision"):
        found = entropy_level(oracle.policy, oracle.rollouts, unit=unit, form=form, **FIXED)
        assert_exact(found.value, oracle.taylor[unit][0])


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("form", FORMS)
def test_slope(oracle, form, unit):
    """Forward and reverse mode, both forms: the derivative of the true entropy."""
    truth = oracle.taylor[unit][1]
    for mode, tolerance in (
        ("jvp", EXACT),
        ("double_backward", EXACT),
        ("reverse", EXACT),
        ("central", CENTRAL),
    ):
        found = first_order(
            oracle.policy,
            oracle.rollouts,
            oracle.direction,
            form=form,
            mode=mode,
            unit=unit,
            **QUICK,
        )
        assert_close(found.value, truth, tolerance)


@pytest.mark.parametrize("form", FORMS)
def test_slope_of_simple_entropy(few, form):
    """-log pi has the same expectation, hence the same slope."""
    found = first_order(
        few.policy, few.rollouts, few.direction, form=form, entropy="simple", **QUICK
    )
    assert_exact(found.value, few.taylor["token"][1])


def test_direct_and_state_terms_add_up(oracle):
    found = first_order(oracle.policy, oracle.rollouts, oracle.direction, **QUICK)
    terms = found.diagnostics["direct"].value + found.diagnostics["state"].value
    assert_exact(terms, oracle.taylor["token"][1])


def test_the_cases_have_state_terms_worth_testing():
    shares = []
    for kind, seed, temperature in [(k, s, t) for k in KINDS for s in SEEDS for t in TEMPERATURES]:
        c = case(kind, seed, temperature)
        state = first_order(c.policy, c.rollouts, c.direction, **QUICK).diagnostics["state"]
        shares.append(abs(state.value / c.taylor["token"][1]))
    assert sorted(shares)[len(shares) // 2] > 0.05


@pytest.mark.parametrize("form", ["snis", "per_decision"])
@pytest.mark.parametrize("unit", UNITS)
def test_measured_change(oracle, form, unit):
    """Four etas in one call: the reweighted rollouts give the true change, however large."""
    for entropy in ("rao_blackwell", "simple"):
        found = measured_many(
            oracle.policy,
            oracle.rollouts,
            {"v": oracle.direction},
            ETAS,
            form=form,
            unit=unit,
            entropy=entropy,
            **QUICK,
        )
        for eta in ETAS:
            estimate = found[Measurement("v", eta)]
            assert_exact(estimate.value, oracle.change[unit, eta])
            assert_exact(float(estimate.diagnostics["integrand_N"].sum()), estimate.value)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("form", FORMS)
def test_curvature(oracle, form, unit):
    _, slope, bend = oracle.taylor[unit]
    found = curvature(
        oracle.policy, oracle.rollouts, oracle.direction, form=form, unit=unit, **QUICK
    )
    assert_exact(found.value, bend)
    assert_exact(found.diagnostics["slope"].value, slope)
    eta = found.diagnostics["linear_range"]
    assert_close(abs(eta * bend / 2), 0.1 * abs(slope), 1e-6)


@pytest.mark.parametrize("mode", ["double_backward", "central"])
def test_curvature_in_other_modes(few, mode):
    found = curvature(few.policy, few.rollouts, few.direction, mode=mode, **QUICK)
    tolerance = EXACT if mode == "double_backward" else CENTRAL_SECOND
    assert_close(found.value, few.taylor["token"][2], tolerance)


def test_parts(oracle):
    """Each part's slope is the true slope along it, and nothing is left unexplained."""
    found = first_order_by_part(oracle.policy, oracle.rollouts, oracle.direction, **QUICK)
    for part, line in found.lines.items():
        v = oracle.direction.parts[part]
        assert_exact(line.value, exact_slope(oracle.policy, oracle.policy.params, v))
    assert_exact(found.unexplained.value, 0.0)


def test_odd_and_even_parts_of_a_symmetric_sweep(few):
    """(f(+) - f(-)) / 2 is eta times the slope up to eta^3, (f(+) + f(-)) / 2 the bend."""
    eta = 1e-3
    found = measured_many(
        few.policy, few.rollouts, {"v": few.direction}, [eta], symmetric=True, **QUICK
    )
    odd, even = odd_and_even(found[Measurement("v", eta)], found[Measurement("v", -eta)])
    _, slope, bend = few.taylor["token"]
    assert_close(odd.value / eta, slope, 1e-3)
    assert_close(2 * even.value / eta**2, bend, 1e-3)


def test_cross_fitted_baseline_keeps_the_expectation(oracle):
    found = first_order(oracle.policy, oracle.rollouts, oracle.direction, baseline=True, **QUICK)
    assert_exact(found.value, oracle.taylor["token"][1])


def test_resampled(few):
    """A sampler that lists every response of the changed policy gives the exact change."""

    def list_all(params, generator):
        there = type("There", (), {**vars(few.policy), "params": params})()
        there.logits, there.prompt_tokens = few.policy.logits, few.policy.prompt_tokens
        return all_rollouts(there)

    for eta in ETAS:
        found = resampled(
            few.policy, list_all, few.direction, eta, generator=torch.Generator(), **QUICK
        )
        assert_exact(found.value, few.change["token", eta])


def test_stale_rollouts_are_reweighted(few):
    """Rollouts of another policy, with its log-probs, speak for this one all the same."""
    old = {
        name: value + 0.2 * few.direction.gradient[name]
        for name, value in few.policy.params.items()
    }
    with torch.no_grad():
        behaviour_NS = few.policy.score(old, few.rollouts).logprob_NS
    stale = with_weights(few.rollouts, behaviour_NS.sum(1).exp())
    stale = Rollouts(**{**vars(stale), "behaviour_logprob_NS": behaviour_NS})
    for form, measured_form in (("matched", "snis"), ("to_go", "per_decision")):
        level = entropy_level(few.policy, stale, form=measured_form, **FIXED)
        assert_exact(level.value, few.taylor["token"][0])
        slope = first_order(few.policy, stale, few.direction, form=form, **QUICK)
        assert_exact(slope.value, few.taylor["token"][1])
        reverse = first_order(few.policy, stale, few.direction, form=form, mode="reverse", **QUICK)
        assert_exact(reverse.value, few.taylor["token"][1])
        bend = curvature(few.policy, stale, few.direction, form=form, **QUICK)
        assert_exact(bend.value, few.taylor["token"][2])
        found = measured_many(
            few.policy, stale, {"v": few.direction}, ETAS, form=measured_form, **QUICK
        )
        for eta in ETAS:
            assert_exact(found[Measurement("v", eta)].value, few.change["token", eta])


def test_eta_zero_gives_exactly_zero(few):
    for form in ("snis", "per_decision"):
        found = measured_many(
            few.policy, few.rollouts, {"v": few.direction}, [0.0], form=form, **FIXED
        )
        estimate = found[Measurement("v", 0.0)]
        assert estimate.value == 0.0
        assert estimate.stderr == 0.0
        assert estimate.noise_floor < 1e-14
