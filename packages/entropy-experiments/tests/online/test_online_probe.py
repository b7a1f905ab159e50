"""The online probe on policies that can be enumerated, trained by torch's own optimizers.

E is every response with its probability, so predictions are exact derivatives along the step that
the optimizer really makes, and measurements are exact changes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from entropy_experiments.online import probe as probe_module
from entropy_experiments.online.evaluation_rollouts import Fresh
from entropy_experiments.online.probe import OnlineProbe
from oracles.enumeration import all_rollouts, exact_entropy, exact_taylor
from oracles.tabular import TabularPolicy
from oracles.transformer import TransformerPolicy
from tolerances import assert_exact

pytestmark = pytest.mark.exact

KINDS = {"tabular": TabularPolicy.random, "transformer": TransformerPolicy}
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.02, weight_decay=0.05, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
}


class Training:
    """A policy whose parameters an optimizer moves, with made-up gradients."""

    def __init__(self, kind: str, optimizer: str, seed: int = 3) -> None:
        self.policy: Any = KINDS[kind](seed)
        self.optimizer = OPTIMIZERS[optimizer](list(self.policy.params.values()))
        self.generator = torch.Generator().manual_seed(seed)
        self.probe = OnlineProbe(self.policy, Fresh(lambda _: all_rollouts(self.policy)))

    def backward(self) -> dict[str, Any]:
        for value in self.policy.params.values():
            value.grad = torch.randn(value.shape, generator=self.generator, dtype=value.dtype)
        return {name: value.grad for name, value in self.policy.params.items()}

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.policy.params.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_step_is_predicted_and_measured_exactly(kind, optimizer):
    training = Training(kind, optimizer)
    for _ in range(4):  # momentum joins from the second on
        gradient = training.backward()
        before = training.copy()
        prediction = training.probe.before_step(gradient, training.optimizer)
        training.optimizer.step()
        found = training.probe.after_step()
        after = training.copy()
        v = {name: (after[name] - old) / prediction.lr for name, old in before.items()}
        level, slope, _ = exact_taylor(training.policy, before, v, unit="token")
        assert_exact(prediction.entropy.value, level)
        assert_exact(prediction.change.value, prediction.lr * slope)
        assert_exact(prediction.direct.value + prediction.state.value, prediction.lr * slope)
        truth = exact_entropy(training.policy, after) - exact_entropy(training.policy, before)
        assert_exact(found.change.value, float(truth))
        assert found.mismatch < 1e-12
        assert found.bend.value == pytest.approx(float(truth) - prediction.lr * slope, abs=1e-10)


def second_order_misses(kind: str, rate: float) -> tuple[float, float]:
    """(first-order miss, second-order miss) of one AdamW step from a warm state at this rate."""
    training = Training(kind, "adamw")
    training.probe = OnlineProbe(
        training.policy, Fresh(lambda _: all_rollouts(training.policy)), order=2
    )
    training.backward()
    training.optimizer.step()
    training.optimizer.param_groups[0]["lr"] = rate
    before = training.copy()
    prediction = training.probe.before_step(training.backward(), training.optimizer)
    after_prediction = training.copy()
    assert all(torch.equal(after_prediction[name], old) for name, old in before.items())
    training.optimizer.step()
    found = training.probe.after_step()
    truth = float(
        exact_entropy(training.policy, training.copy()) - exact_entropy(training.policy, before)
    )
    assert prediction.second_order is not None
    assert prediction.best is prediction.second_order
    assert found.second_miss is not None
    assert found.second_miss.value == pytest.approx(truth - prediction.second_order.value, abs=1e-9)
    return prediction.change.value - truth, prediction.second_order.value - truth


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_order_prediction_errs_in_third_order(kind):
    """Halving the step divides the straight line's miss by 4 and the second-order one's by 8."""
    (line, curve), (half_line, half_curve) = (
        second_order_misses(kind, rate) for rate in (0.02, 0.01)
    )
    assert line / half_line == pytest.approx(4, rel=0.15)
    assert curve / half_curve == pytest.approx(8, rel=0.15)
    assert abs(curve) < 0.2 * abs(line)


@pytest.mark.parametrize("broken", ["without the factor 2", "+eta for -eta"])
def test_third_order_has_teeth(broken, monkeypatch):
    if broken == "+eta for -eta":
        ahead = probe_module.shifted
        monkeypatch.setattr(probe_module, "shifted", lambda p, v, step: ahead(p, v, abs(step)))
    else:
        monkeypatch.setattr(probe_module, "even_part", lambda predicted, minus: minus)
    with pytest.raises(AssertionError):
        test_the_second_order_prediction_errs_in_third_order("tabular")


def test_the_baseline_is_what_a_zero_gradient_would_do():
    training = Training("tabular", "adamw")
    training.backward()
    training.optimizer.step()
    gradient = training.backward()
    found = training.probe.before_step(gradient, training.optimizer)
    assert found.baseline is not None
    state = training.optimizer.state[next(iter(training.policy.params.values()))]
    # The denominator keeps this gradient: rebuilt by hand from torch's own state.
    (name, theta), *_ = training.policy.params.items()
    t, g = float(state["step"]) + 1, gradient[name]
    root = ((0.999 * state["exp_avg_sq"] + 0.001 * g**2) / (1 - 0.999**t)).sqrt() + 1e-8
    v = {name: -0.9 * state["exp_avg"] / (1 - 0.9**t) / root - 0.1 * theta}
    _, slope, _ = exact_taylor(training.policy, training.policy.params, v, unit="token")
    assert_exact(found.baseline.value, 0.02 * slope)
    assert found.baseline_share == pytest.approx(found.baseline.value / found.change.value)


def test_a_parameter_without_gradient_stays_and_starts_late():
    policy: Any = TransformerPolicy(3)
    optimizer = OPTIMIZERS["adamw"](list(policy.params.values()))
    probe = OnlineProbe(policy, Fresh(lambda _: all_rollouts(policy)))
    generator = torch.Generator().manual_seed(0)
    late = next(iter(policy.params))
    for step in range(4):
        for name, value in policy.params.items():
            value.grad = torch.randn(value.shape, generator=generator, dtype=value.dtype)
            if name == late and step < 2:
                value.grad = None
        probe.before_step({n: p.grad for n, p in policy.params.items()}, optimizer)
        optimizer.step()
        assert probe.after_step().mismatch < 1e-12


def test_groups_may_have_other_rates_and_the_first_may_rest():
    policy: Any = TransformerPolicy(3)
    first, *rest = policy.params.values()
    optimizer = torch.optim.AdamW(
        [{"params": [first], "lr": 0.0}, {"params": rest, "lr": 0.02}], weight_decay=0.1
    )
    probe = OnlineProbe(policy, Fresh(lambda _: all_rollouts(policy)))
    generator = torch.Generator().manual_seed(0)
    for rate in (0.0, 0.01):
        optimizer.param_groups[0]["lr"] = rate
        for value in policy.params.values():
            value.grad = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        probe.before_step({n: p.grad for n, p in policy.params.items()}, optimizer)
        optimizer.step()
        assert probe.after_step().mismatch < 1e-12


def test_a_slope_lost_in_its_noise_has_no_linear_range():
    training = Training("tabular", "adamw")
    training.probe.before_step(training.backward(), training.optimizer)
    training.optimizer.step()
    found = training.probe.after_step()
    value = found.prediction.change.value

    def reach(*interval):
        change = replace(found.prediction.change, interval=interval)
        return replace(found, prediction=replace(found.prediction, change=change)).linear_range

    assert reach(-1.0, 1.0) is None
    assert reach(*sorted((0.9 * value, 1.1 * value))) > 0


@pytest.mark.parametrize("order", [1, 2])
def test_a_fall_by_more_than_all_the_entropy_is_not_trusted(order):
    """Along one gradient at ever higher rates, and along its opposite, which raises entropy."""
    why = "below 0 it cannot be"
    seen = set()
    for sign, rate in ((1, 0.02), (1, 50.0), (-1, 0.02), (-1, 50.0)):
        policy = TabularPolicy.random(3)
        buffer = Fresh(lambda _, policy=policy: all_rollouts(policy))
        probe = OnlineProbe(policy, buffer, order=order)
        generator = torch.Generator().manual_seed(3)
        gradient = {
            name: sign * torch.randn(value.shape, generator=generator, dtype=value.dtype)
            for name, value in policy.params.items()
        }
        optimizer = torch.optim.SGD(list(policy.params.values()), lr=rate)
        found = probe.before_step(gradient, optimizer)
        for one in filter(None, (found.change, found.second_order)):
            impossible = found.entropy.value + one.value < 0
            assert any(why in reason for reason in one.why_not) == impossible
            seen.add(impossible)
    assert seen == {False, True}


def test_a_skipped_step_measures_nothing():
    training = Training("tabular", "adamw")
    training.probe.before_step(training.backward(), training.optimizer)
    found = training.probe.after_step()  # the scaler found an inf and did not step
    assert found.skipped
    assert found.change.value == 0
    assert found.linear_range is None
    assert found.never_made
    assert found.mismatch is None  # not 0: nothing was compared


def test_a_step_that_was_to_move_nothing_was_made():
    """No gradient yet, no moments, no decay: AdamW's step is zero, and no weight changes."""
    training = Training("tabular", "adamw")
    training.optimizer.param_groups[0]["weight_decay"] = 0.0
    gradient = {name: torch.zeros_like(g) for name, g in training.backward().items()}
    training.probe.before_step(gradient, training.optimizer)
    found = training.probe.after_step()
    assert found.step_norm == 0
    assert found.mismatch == 0
    assert not found.never_made


def test_another_step_than_the_predicted_one_is_noticed():
    training = Training("tabular", "adamw")
    training.probe.before_step(training.backward(), training.optimizer)
    training.backward()  # other gradients than those predicted with
    training.optimizer.step()
    assert training.probe.after_step().mismatch > 0.1


def test_stale_rollouts_are_weighted():
    """Rollouts of step 0 still give the exact answer at step 1: enumeration with weights."""
    training = Training("tabular", "adamw")
    first = all_rollouts(training.policy)
    probe = OnlineProbe(training.policy, Fresh(lambda _: first, uses=2))
    for _ in range(2):
        gradient = training.backward()
        before = training.copy()
        prediction = probe.before_step(gradient, training.optimizer)
        training.optimizer.step()
        found = probe.after_step()
        truth = exact_entropy(training.policy, training.copy()) - exact_entropy(
            training.policy, before
        )
        assert_exact(prediction.entropy.value, float(exact_entropy(training.policy, before)))
        assert_exact(found.change.value, float(truth))


def test_gradients_modes_and_random_numbers_stay():
    training = Training("transformer", "adamw")
    gradient = training.backward()
    kept = {name: value.clone() for name, value in gradient.items()}
    theta, noise = training.copy(), torch.random.get_rng_state()
    torch.set_float32_matmul_precision("high")
    try:
        training.probe.before_step(gradient, training.optimizer)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(noise, torch.random.get_rng_state())
    for name, value in training.policy.params.items():
        assert torch.equal(value.grad, kept[name])
        assert torch.equal(value, theta[name])
    assert not training.optimizer.state  # not even its lazy state was made


def test_out_of_order_calls_are_refused():
    training = Training("tabular", "adamw")
    with pytest.raises(RuntimeError, match=r"after_step\(\) without before_step"):
        training.probe.after_step()
    none = dict.fromkeys(training.policy.params)
    with pytest.raises(ValueError, match="Not one of 1 parameters has a gradient"):
        training.probe.before_step(none, training.optimizer)
    other = torch.optim.AdamW([torch.zeros(2, requires_grad=True)])
    with pytest.raises(ValueError, match="does not hold 1 of 1 trainable parameters"):
        training.probe.before_step(training.backward(), other)
