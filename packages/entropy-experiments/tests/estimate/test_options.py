"""EstimatorOptions and single keywords are two ways to say the same, and a keyword wins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from entropy_experiments.estimate.curvature import curvature
from entropy_experiments.estimate.first_order import first_order, first_order_by_part
from entropy_experiments.estimate.level import entropy_level
from entropy_experiments.estimate.measured import measured
from entropy_experiments.estimate.options import EstimatorOptions
from oracles.cases import arbitrary_weights, case

pytestmark = pytest.mark.exact

ETA = 0.1
OPTIONS = EstimatorOptions(form="snis", unit="sequence", entropy="simple", horizon=9, repackings=0)
MEASURED = {"form": "snis", "unit": "sequence", "entropy": "simple", "horizon": 9}
SLOPES = {**MEASURED, "form": "matched", "repackings": 0}


@pytest.fixture(scope="module")
def oracle():
    return case("tabular", 1, 1.0)


def test_options_and_keywords_give_the_same_estimate(oracle):
    policy, rollouts, direction = oracle.policy, oracle.rollouts, oracle.direction
    pairs = [
        (
            first_order(policy, rollouts, direction, OPTIONS),
            first_order(policy, rollouts, direction, **SLOPES),
        ),
        (
            first_order_by_part(policy, rollouts, direction, OPTIONS).total,
            first_order_by_part(policy, rollouts, direction, **SLOPES).total,
        ),
        (
            curvature(policy, rollouts, direction, OPTIONS),
            curvature(policy, rollouts, direction, **SLOPES),
        ),
        (
            measured(policy, rollouts, direction, ETA, OPTIONS),
            measured(policy, rollouts, direction, ETA, repackings=0, **MEASURED),
        ),
        (entropy_level(policy, rollouts, OPTIONS), entropy_level(policy, rollouts, **MEASURED)),
    ]
    for ours, theirs in pairs:
        assert ours.value == theirs.value
        assert ours.estimand == theirs.estimand == OPTIONS.estimand(policy)


@pytest.mark.parametrize("change", [{"unit": "token"}, {"entropy": "rao_blackwell"}])
def test_options_have_teeth(oracle, change):
    """An option that did not reach its estimator would be seen: the numbers differ."""
    rollouts = arbitrary_weights(oracle.rollouts, 1)
    one, other = (
        measured(oracle.policy, rollouts, oracle.direction, ETA, options).value
        for options in (OPTIONS, replace(OPTIONS, **change))
    )
    assert abs(one - other) > 1e-6


def test_passes_have_the_size_that_the_options_say(oracle, monkeypatch):
    sizes: set[int] = set()
    own = type(oracle.policy).score

    def seen(policy, params, part):
        sizes.add(len(part))
        return own(policy, params, part)

    monkeypatch.setattr(type(oracle.policy), "score", seen)
    options = replace(OPTIONS, microbatch=3, forward_microbatch=5)
    entropy_level(oracle.policy, oracle.rollouts, options)
    assert max(sizes) == 5
    sizes.clear()
    entropy_level(oracle.policy, oracle.rollouts, options, microbatch=4)
    assert max(sizes) == 4


@pytest.mark.faults
def test_what_is_no_options_is_refused(oracle):
    with pytest.raises(TypeError, match="Got a dict as options; expected EstimatorOptions"):
        first_order(oracle.policy, oracle.rollouts, oracle.direction, {"form": "to_go"})
    with pytest.raises(ValueError, match="forward_microbatch is 0; expected at least 1"):
        EstimatorOptions(forward_microbatch=0)


def test_a_keyword_wins_over_the_options(oracle):
    policy, rollouts, direction = oracle.policy, oracle.rollouts, oracle.direction
    change = measured(policy, rollouts, direction, ETA, OPTIONS, form="per_decision")
    assert change.estimand.form == "per_decision"
    assert change.estimand.unit == "sequence"
    slope = first_order(policy, rollouts, direction, OPTIONS, form="to_go")
    assert slope.estimand.form == "per_decision"
    assert OPTIONS.form == "snis"
