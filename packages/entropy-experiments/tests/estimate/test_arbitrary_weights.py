"""A slope is the derivative of *exactly* what is measured, for any weights at all.

With exact probabilities as weights, several wrong formulas have the right expectation. Under
weights that are nobody's probabilities they do not: this is what catches "include the current
token in a" and "whole-rollout weights for per-decision".
"""

import pytest

from entropy_experiments import curvature, entropy_level, first_order, measured
from oracles.cases import KINDS, TEMPERATURES, arbitrary_weights, case
from oracles.naive import slope_formula, weighted_taylor
from tolerances import EXACT, assert_close, assert_exact

pytestmark = pytest.mark.exact

PAIRS = {"matched": "snis", "to_go": "per_decision"}
QUICK = {"prompts": "fixed", "microbatch": 64, "repackings": 0}


@pytest.fixture(params=[(k, s, t) for k in KINDS for s in range(10) for t in TEMPERATURES], ids=str)
def weighted(request):
    kind, seed, temperature = request.param
    found = case(kind, seed, temperature)
    return found.policy, arbitrary_weights(found.rollouts, seed), found.direction


@pytest.mark.parametrize("form", PAIRS)
def test_slope_is_the_derivative_of_its_paired_measurement(weighted, form):
    policy, rollouts, direction = weighted
    value, slope = weighted_taylor(policy, rollouts, direction.total, form=PAIRS[form], order=1)
    level = entropy_level(policy, rollouts, form=PAIRS[form], prompts="fixed")
    assert_exact(level.value, value)
    for mode in ("jvp", "reverse"):
        found = first_order(policy, rollouts, direction, form=form, mode=mode, **QUICK)
        assert_exact(found.value, slope)


@pytest.mark.parametrize("entropy", ["rao_blackwell", "simple"])
@pytest.mark.parametrize("unit", ["token", "sequence"])
@pytest.mark.parametrize("form", PAIRS)
def test_every_unit_and_payload(form, unit, entropy):
    found = case("transformer", 1, 0.7)
    rollouts = arbitrary_weights(found.rollouts, 1)
    how = {"unit": unit, "entropy": entropy}
    _, slope, bend = weighted_taylor(
        found.policy, rollouts, found.direction.total, form=PAIRS[form], **how
    )
    for mode in ("jvp", "reverse"):
        got = first_order(
            found.policy, rollouts, found.direction, form=form, mode=mode, **how, **QUICK
        )
        assert_exact(got.value, slope)
    bent = curvature(found.policy, rollouts, found.direction, form=form, **how, **QUICK)
    assert_exact(bent.value, bend)


@pytest.mark.parametrize("form", PAIRS)
def test_slope_is_the_limit_of_the_measurement(form):
    """The same through our own code: measured change over eta tends to the slope."""
    found = case("transformer", 2, 1.0)
    rollouts = arbitrary_weights(found.rollouts, 2)
    slope = first_order(found.policy, rollouts, found.direction, form=form, **QUICK).value
    eta = 1e-4
    plus, minus = (
        measured(found.policy, rollouts, found.direction, sign * eta, form=PAIRS[form], **QUICK)
        for sign in (1, -1)
    )
    assert_close((plus - minus).value / (2 * eta), slope, 1e-6)


@pytest.mark.parametrize("form", PAIRS)
def test_slope_equals_the_written_formula(form):
    """The formulas of docs/theory.md, as loops, against the derivative of `ratio_sums`."""
    for kind in KINDS:
        found = case(kind, 3, 0.7)
        rollouts = arbitrary_weights(found.rollouts, 3)
        got = first_order(found.policy, rollouts, found.direction, form=form, **QUICK)
        expected = slope_formula(found.policy, rollouts, found.direction.total, form=form)
        assert_close(got.value, expected, EXACT)
