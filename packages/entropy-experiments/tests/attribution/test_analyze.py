"""`analyze_step` against the exact entropy of policies small enough to enumerate.

The evaluation rollouts are every response weighted by its probability, so every number is the true
one to rounding, and the account closes: tokens to lines, lines to the prediction, and with the
curvature to the measurement.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attribution.test_ledger import LR, MAX_NORM, OBJECTIVES, world
from entropy_experiments import EstimatorOptions, StepOptions, analyze_step
from entropy_experiments.attribution.terms import GRADIENT_LINES
from oracles.cases import KINDS
from oracles.enumeration import exact_change, exact_taylor
from tolerances import assert_exact

pytestmark = pytest.mark.exact

EXACTLY = EstimatorOptions(prompts="fixed", microbatch=64, repackings=0)


def options_of(w, **changes):
    return StepOptions(
        objective=w.objective,
        max_grad_norm=MAX_NORM,
        estimator=replace(EXACTLY, **changes),
        folds=1,
    )


def analysis_of(w, **changes):
    return analyze_step(
        w.policy, w.optimizer, w.batch, w.evaluation, options_of(w, **changes), trained=w.trained
    )


@pytest.mark.parametrize(("form", "unit"), [("per_decision", "token"), ("snis", "sequence")])
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_exact_and_the_account_closes(kind, name, form, unit):
    w = world(kind, 1, name)
    found = analysis_of(w, form=form, unit=unit)
    theta, v = w.policy.params, found.direction.total
    level, slope, bend = exact_taylor(w.policy, theta, v, unit=unit)
    assert_exact(found.level.value, level)
    assert_exact(found.predicted.value, LR * slope)
    assert_exact(found.measured.value, exact_change(w.policy, theta, v, LR, unit=unit))
    assert_exact(found.ledger.curvature.value, LR**2 / 2 * bend)
    lines = {name: line.value for name, line in found.ledger.lines.items()}
    assert_exact(sum(lines.values()), found.predicted.value)
    of_batch = sum(value for line, value in lines.items() if line in GRADIENT_LINES)
    assert_exact(float(found.tokens.value_NS.sum()), of_batch)
    assert_exact(found.matrix.total, of_batch)


@pytest.mark.parametrize("dropped", ["momentum", "decay", "positive"])
def test_the_account_has_teeth(dropped):
    """A line that is left out must be visible to the sums above."""
    lines = analysis_of(world("transformer", 1, "grpo")).ledger.lines
    assert abs(lines[dropped].value) > 1e-6 * sum(abs(line.value) for line in lines.values())


def test_torchs_own_optimizer_serves_and_nothing_changes():
    w = world("tabular", 1, "bare")
    live = {k: p.detach().clone().requires_grad_() for k, p in w.policy.params.items()}
    policy = replace(w.policy, params=live)
    optimizer = torch.optim.AdamW(live.values(), lr=LR)  # no step yet: all of it is this batch's
    before = {k: p.detach().clone() for k, p in live.items()}
    found = analyze_step(policy, optimizer, w.batch, w.evaluation, options_of(w))
    assert found.ledger.lines["positive"].value != 0
    assert all(torch.equal(live[k], before[k]) for k in live)
    assert not optimizer.state


def test_a_subclass_with_its_own_step_is_refused_by_name():
    class SignedAdamW(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    w = world("tabular", 1, "bare")
    optimizer = SignedAdamW(w.policy.params.values(), lr=LR)
    with pytest.raises(ValueError, match="a SignedAdamW, a subclass of AdamW with a step"):
        analyze_step(w.policy, optimizer, w.batch, w.evaluation, options_of(w))


def test_options_that_have_no_slope_are_refused():
    with pytest.raises(ValueError, match=r"EstimatorOptions.form is 'resampled'; expected one of"):
        EstimatorOptions(form="resampled")
    with pytest.raises(ValueError, match="microbatch is 0; expected at least 1"):
        EstimatorOptions(microbatch=0)


def test_a_fall_by_more_than_all_the_entropy_is_not_trusted():
    w, seen = world("tabular", 1, "bare"), set()
    for sign in (1, -1):
        optimizer = torch.optim.AdamW(w.policy.params.values(), lr=40.0, weight_decay=0.0)
        batch = replace(w.batch, advantage_NS=sign * w.batch.advantage_NS)
        found = analyze_step(w.policy, optimizer, batch, w.evaluation, options_of(w))
        impossible = found.level.value + found.predicted.value < 0
        assert any("below 0 it cannot be" in why for why in found.predicted.why_not) == impossible
        seen.add(impossible)
    assert seen == {False, True}
