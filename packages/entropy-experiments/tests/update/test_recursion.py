"""The optimizer's step as a recursion: torch's own steps, one after the other, to rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from entropy_experiments.toy import BigramPolicy
from entropy_experiments.types import OptimizerState, SGDGroup
from entropy_experiments.update.optimizer import read_state
from entropy_experiments.update.rebuilt import rebuilt_direction
from entropy_experiments.update.recursion import advanced, first_moment, step_recursion
from tolerances import OPTIMIZER

pytestmark = pytest.mark.exact

KINDS = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "ascent": (torch.optim.AdamW, {"maximize": True}),
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
}
MAX_NORM = 1.5


def leaves_of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
        for name, shape in (("a", (3, 2)), ("b", (4,)))
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_replayed_steps_are_torchs_own(kind, dtype):
    """Five steps from the state after the second, with two groups and clipping."""
    leaves = leaves_of(dtype)
    torch_class, options = KINDS[kind]
    optimizer = torch_class(
        [{"params": [leaves["a"]], "lr": 0.05}, {"params": [leaves["b"]], "lr": 0.01}], **options
    )
    generator = torch.Generator().manual_seed(1)
    params, state = None, None
    for step in range(7):
        gradient = {
            name: torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(dtype)
            for name, leaf in leaves.items()
        }
        if step == 2:
            params = {name: leaf.detach().clone() for name, leaf in leaves.items()}
            state = read_state(optimizer, leaves)
        if params is not None and state is not None:
            one = step_recursion(params, gradient, state, max_grad_norm=MAX_NORM)
            direction = rebuilt_direction(params, gradient, state, max_grad_norm=MAX_NORM)
            for name, value in direction.total.items():
                torch.testing.assert_close(
                    one.change[name].to(dtype), direction.lr * value, rtol=1e-5, atol=1e-7
                )
            params, state = advanced(params, state, one)
        for name, leaf in leaves.items():
            leaf.grad = gradient[name].clone()
        torch.nn.utils.clip_grad_norm_(list(leaves.values()), MAX_NORM)
        optimizer.step()
    assert params is not None and state is not None  # noqa: PT018
    tolerance = OPTIMIZER[str(dtype).removeprefix("torch.")]
    stored = read_state(optimizer, leaves)
    for name, leaf in leaves.items():
        assert params[name].dtype == dtype
        assert float((params[name] - leaf.detach()).norm() / leaf.detach().norm()) < 4 * tolerance
        for key, value in stored.state.get(name, {}).items():
            torch.testing.assert_close(
                torch.as_tensor(state.state[name][key], dtype=torch.float64),
                torch.as_tensor(value, dtype=torch.float64),
                rtol=20 * tolerance,
                atol=20 * tolerance,
            )


def test_before_its_first_step_there_is_no_moment():
    leaves = leaves_of(torch.float64)
    state = read_state(torch.optim.AdamW(leaves.values()), leaves)
    assert all(not m.any() for m in first_moment(state, leaves).values())
    gradient = {name: torch.ones_like(leaf) for name, leaf in leaves.items()}
    after = step_recursion(leaves, gradient, state)
    _, later = advanced(leaves, state, after)
    for name, moment in first_moment(later, leaves).items():
        torch.testing.assert_close(moment, after.moment_after[name])


def test_a_rate_of_zero_moves_nothing_and_is_remembered():
    """The first step of a warm-up: moments fill, parameters stay."""
    leaves = leaves_of(torch.float64)
    state = read_state(torch.optim.AdamW(leaves.values(), lr=0.0), leaves)
    gradient = {name: torch.ones_like(leaf) for name, leaf in leaves.items()}
    step = step_recursion(leaves, gradient, state)
    assert not any(change.any() for change in step.change.values())
    assert all(moment.any() for moment in step.moment_after.values())


@pytest.mark.parametrize("made", [1, 3, 10])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "momentum", "nesterov"])
def test_what_the_moment_does_later_is_torchs_own_coasting(kind, made):
    """The steps that torch makes without gradients; eps holds the denominator."""
    leaf = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    torch_class, options = KINDS[kind]
    held = {"eps": 1e8} if kind == "adamw" else {}
    optimizer = torch_class([leaf], lr=0.01, **{**options, "weight_decay": 0.0}, **held)
    generator = torch.Generator().manual_seed(3)
    step = None
    for _ in range(made):
        leaf.grad = torch.randn(3, generator=generator, dtype=torch.float64)
        state = read_state(optimizer, {"w": leaf})
        step = step_recursion({"w": leaf}, {"w": leaf.grad}, state)
        optimizer.step()
    assert step is not None
    one, arrived = step.parameters["w"], leaf.detach().clone()
    for _ in range(400):
        leaf.grad = torch.zeros(3, dtype=torch.float64)
        optimizer.step()
    coasted = leaf.detach() - arrived
    expected = -one.later * one.gain * one.after
    torch.testing.assert_close(coasted, expected, rtol=1e-6, atol=0)
    if kind == "adamw":  # teeth: all of the gain held
        assert one.later < 0.85 * one.rho / (1 - one.rho)


def test_momentum_without_end_and_other_optimizers_are_refused():
    leaves = leaves_of(torch.float64)
    gradient = {name: torch.ones_like(leaf) for name, leaf in leaves.items()}
    group = SGDGroup(names=tuple(leaves), lr=0.1, momentum=1.0)
    with pytest.raises(ValueError, match=r"momentum = 1\.0; expected at least 0 and below 1"):
        step_recursion(leaves, gradient, OptimizerState(groups=(group,), state={}))

    @dataclass(frozen=True, kw_only=True)
    class LionGroup:
        names: tuple[str, ...]
        lr: float = 0.1

    odd = OptimizerState(groups=(LionGroup(names=tuple(leaves)),), state={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="groups of type LionGroup; expected AdamGroup or SGDGrou"):
        step_recursion(leaves, gradient, odd)


def test_the_gradient_of_reward_is_its_slope():
    """Both forms: matched, and within prompts."""
    from entropy_experiments.estimate.gradient import weighted_gradient
    from entropy_experiments.estimate.reward import reward_slope, reward_slope_by_prompt
    from entropy_experiments.estimate.reward_gradient import reward_coefficients
    from entropy_experiments.types import Direction

    policy = BigramPolicy()
    rollouts = policy.draw(seed=2)
    reward_N = rollouts.tokens_N.double() % 3
    v = {"table": torch.eye(5).double()}
    direction = Direction(parts={"gradient": v}, lr=0.1)
    for within, slope in ((False, reward_slope), (True, reward_slope_by_prompt)):
        coefficients = reward_coefficients(reward_N, rollouts, within_prompts=within)
        g = weighted_gradient(policy, rollouts, coefficients, microbatch=8)
        expected = slope(policy, rollouts, reward_N, direction).value
        assert float((g["table"] * v["table"]).sum()) == pytest.approx(expected, abs=1e-12)
    stale = replace(rollouts, behaviour_logprob_NS=torch.zeros(rollouts.tokens_NS.shape))
    with pytest.raises(ValueError, match="expected rollouts of the policy itself, whose reward"):
        reward_coefficients(reward_N, stale)
