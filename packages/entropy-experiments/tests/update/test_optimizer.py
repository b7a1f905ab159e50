"""Rebuilt steps against torch.optim, and the sum of their parts."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from entropy_experiments import (
    Objective,
    UpdateBatch,
    compute_update_vector_adamw,
    observed,
    optimizer_certificate,
    read_state,
)
from entropy_experiments.numerics.derivatives import dot, norm, shifted
from entropy_experiments.update.adamw import adamw_direction
from entropy_experiments.update.gradient import clip_factor, loss_gradient
from entropy_experiments.update.optimizer import TORCH_OPTIMIZERS
from entropy_experiments.update.rebuilt import rebuilt_direction
from entropy_experiments.update.recursion import step_recursion
from entropy_experiments.update.sgd import sgd_direction
from oracles.cases import case
from tolerances import OPTIMIZER, PARTS

pytestmark = pytest.mark.exact

SHAPES = {"a": (7, 5), "b": (5,), "c": (3, 4, 2), "d": (1,)}
LR = 3e-4


@cache  # a thousand steps of torch's own are made once for all that are clipped otherwise
def world(dtype, make, steps, *, seed=0, gradient_scale=1.0):
    """Parameters, an optimizer that has made `steps` steps, its state, and the next gradient."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    params = {name: (0.1 * draw(shape)).requires_grad_() for name, shape in SHAPES.items()}
    optimizer = make(params)
    for _ in range(steps):
        for value in params.values():
            value.grad = gradient_scale * draw(value.shape)
        optimizer.step()
    gradient = {name: gradient_scale * draw(value.shape) for name, value in params.items()}
    state = read_state(optimizer, params)
    plain = {name: value.detach().clone() for name, value in params.items()}
    return plain, gradient, state


def two_groups(kind, **options):
    """Decay and no decay at different learning rates, as trainers do it."""

    def make(params):
        groups = [
            {"params": [params["a"], params["c"]], "weight_decay": 0.1},
            {"params": [params["b"], params["d"]], "weight_decay": 0.0, "lr": 5 * LR},
        ]
        return kind(groups, lr=LR, **options)

    return make


ADAM = {
    "plain": two_groups(torch.optim.AdamW),
    "amsgrad": two_groups(torch.optim.AdamW, amsgrad=True),
    "maximize": two_groups(torch.optim.AdamW, maximize=True),
    "coupled": two_groups(torch.optim.Adam),
    "betas": two_groups(torch.optim.AdamW, betas=(0.8, 0.95), eps=1e-6),
    "no-momentum": two_groups(torch.optim.AdamW, betas=(0.0, 0.99)),
}
SGD = {
    "plain": two_groups(torch.optim.SGD),
    "momentum": two_groups(torch.optim.SGD, momentum=0.9),
    "dampening": two_groups(torch.optim.SGD, momentum=0.9, dampening=0.3),
    "nesterov": two_groups(torch.optim.SGD, momentum=0.9, nesterov=True),
    "maximize": two_groups(torch.optim.SGD, momentum=0.5, maximize=True),
}
STEPPERS = {**{f"adam-{k}": (adamw_direction, v) for k, v in ADAM.items()}} | {
    f"sgd-{k}": (sgd_direction, v) for k, v in SGD.items()
}


@pytest.mark.parametrize("max_grad_norm", [None, 0.5, 1e6], ids=["unclipped", "clipped", "idle"])
@pytest.mark.parametrize("steps", [0, 1, 1000])
@pytest.mark.parametrize("name", STEPPERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_certificate(dtype, name, steps, max_grad_norm):
    """The direction is torch's own at lr = 1, and theta + lr v is the stepped theta."""
    rebuild, make = STEPPERS[name]
    params, gradient, state = world(dtype, make, steps)
    direction = rebuild(params, gradient, state, max_grad_norm=max_grad_norm)
    found = optimizer_certificate(direction, params, gradient, state, max_grad_norm=max_grad_norm)
    assert found.relative_error <= OPTIMIZER[str(dtype).removeprefix("torch.")]
    assert found.max_ulp <= 2
    assert found.cosine >= 1 - 1e-12
    assert found.passed


@pytest.mark.parametrize("name", STEPPERS)
def test_parts_sum_to_the_step(name):
    """Against torch's stepped parameters, not against our own total."""
    rebuild, make = STEPPERS[name]
    params, gradient, state = world(torch.float64, make, 10)
    live = {key: value.clone().requires_grad_() for key, value in params.items()}
    optimizer = make(live)
    for key, entry in state.state.items():
        optimizer.state[live[key]] = {
            k: v.clone() if torch.is_tensor(v) else v for k, v in entry.items()
        }
    for key, value in live.items():
        value.grad = gradient[key].clone()
    optimizer.step()
    direction = rebuild(params, gradient, state)
    true_step = {key: live[key].detach() - params[key] for key in params}
    parts = {key: sum(part[key] for part in direction.parts.values()) for key in params}
    gap = {key: LR * parts[key] - true_step[key] for key in params}
    assert norm(gap) <= 1e-9 * norm(true_step)  # theta's own rounding, divided by lr
    exact = {key: parts[key] - direction.total[key] for key in params}
    assert norm(exact) <= PARTS * norm(direction.total)


@pytest.mark.parametrize("name", STEPPERS)
def test_gradient_part_is_the_preconditioned_gradient(name):
    rebuild, make = STEPPERS[name]
    params, gradient, state = world(torch.float64, make, 3)
    direction = rebuild(params, gradient, state, max_grad_norm=0.5)
    for key in params:
        expected = -direction.preconditioner[key] * direction.clip_factor * gradient[key]
        assert torch.allclose(direction.gradient[key], expected, rtol=1e-12, atol=0)
    assert direction.clip_factor < 1


def test_the_certificate_has_teeth():
    """Each forgotten ingredient of the earlier system's step is seen."""
    params, gradient, state = world(torch.float64, ADAM["plain"], 3)
    good = adamw_direction(params, gradient, state, max_grad_norm=0.5)

    def certify(direction):
        return optimizer_certificate(direction, params, gradient, state, max_grad_norm=0.5)

    assert certify(good).passed
    no_decay = [replace(group, weight_decay=0.0) for group in state.groups]
    one_rate = [replace(group, lr=LR) for group in state.groups]
    one_step_behind = {
        name: {**entry, "step": entry["step"] - 1} for name, entry in state.state.items()
    }
    for broken in (
        adamw_direction(params, gradient, state),  # clipping ignored
        adamw_direction(
            params, gradient, replace(state, groups=tuple(no_decay)), max_grad_norm=0.5
        ),
        adamw_direction(
            params, gradient, replace(state, groups=tuple(one_rate)), max_grad_norm=0.5
        ),
        adamw_direction(params, gradient, replace(state, state=one_step_behind), max_grad_norm=0.5),
        good.only("gradient", "decay"),  # momentum forgotten
    ):
        assert not certify(broken).passed


def test_clip_factor_is_torchs():
    params, gradient, _ = world(torch.float64, ADAM["plain"], 0)
    leaves = [value.clone().requires_grad_() for value in params.values()]
    for leaf, g in zip(leaves, gradient.values()):
        leaf.grad = g.clone()
    total = torch.nn.utils.clip_grad_norm_(leaves, 0.7)
    factor, size = clip_factor(gradient, 0.7)
    assert abs(size - float(total)) <= 1e-12 * size
    for leaf, g in zip(leaves, gradient.values()):
        assert torch.allclose(leaf.grad, factor * g, rtol=1e-12, atol=0)


def test_observed_step_is_the_change_over_lr():
    params, gradient, state = world(torch.float64, ADAM["plain"], 3)
    direction = adamw_direction(params, gradient, state)
    after = shifted(params, direction.total, LR)
    found = observed(params, after, LR)
    gap = {key: found.total[key] - direction.total[key] for key in params}
    assert norm(gap) <= 1e-9 * norm(direction.total)
    with pytest.raises(KeyError, match="no part 'momentum'"):
        _ = found.momentum


def test_update_vector_of_a_policy():
    """From rollouts to (direction, baseline, stats), and the step descends the loss."""
    oracle = case("transformer", 0, 1.0)
    policy, rollouts = oracle.policy, oracle.rollouts
    generator = torch.Generator().manual_seed(0)
    advantage_N = torch.randn(len(rollouts), generator=generator, dtype=torch.float64)
    batch = UpdateBatch(
        rollouts=rollouts, advantage_NS=advantage_N[:, None].expand(rollouts.tokens_NS.shape)
    )
    objective = Objective(loss="reinforce")
    live = {name: value.clone().requires_grad_() for name, value in policy.params.items()}
    optimizer = torch.optim.AdamW(live.values(), lr=1e-4, weight_decay=0.01)
    for value in live.values():
        value.grad = torch.full_like(value, 0.1)
    optimizer.step()
    state = read_state(optimizer, live)
    direction, baseline, stats = compute_update_vector_adamw(
        policy, batch, objective, state, max_grad_norm=0.05, microbatch=7
    )
    assert stats.microbatches == -(-len(rollouts) // 7)
    assert abs(stats.clipped_norm - 0.05) < 1e-6
    assert set(baseline.parts) == {"momentum", "decay"}
    for part, shares in stats.shares.items():
        assert abs(sum(shares.values()) - 1) < 1e-12, part
    found = loss_gradient(policy, batch, objective, microbatch=100)
    assert dot(found.gradient, direction.gradient) < 0
    certificate = optimizer_certificate(
        direction, policy.params, found.gradient, state, max_grad_norm=0.05
    )
    assert certificate.relative_error < 1e-12


def test_reinforce_gradient_is_the_gradient_of_expected_reward():
    """On every response with its probability, -grad L is the exact policy gradient."""
    from oracles.enumeration import plain_scores

    oracle = case("transformer", 4, 0.7)
    policy, rollouts = oracle.policy, oracle.rollouts
    reward_N = torch.randn(
        len(rollouts), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    batch = UpdateBatch(
        rollouts=rollouts,
        advantage_NS=reward_N[:, None].expand(rollouts.tokens_NS.shape),
        reward_N=reward_N,
    )
    found = loss_gradient(policy, batch, Objective(loss="reinforce"))
    leaves = {name: value.clone().requires_grad_() for name, value in policy.params.items()}
    logp_N = plain_scores(policy, leaves, rollouts)[0].sum(1)
    value = (logp_N.exp() / policy.prompts * reward_N).sum()
    for (name, g), expected in zip(
        found.gradient.items(), torch.autograd.grad(value, tuple(leaves.values()))
    ):
        assert torch.allclose(-g, expected, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_with_momentum_and_a_first_gradient_that_comes_late(nesterov):
    """Its buffer begins as that gradient, steps after the others': as torch has it."""
    from entropy_experiments.update.optimizer import direction_of

    torch.manual_seed(0)
    params = {name: torch.nn.Parameter(torch.randn(3, dtype=torch.float64)) for name in "ab"}
    optimizer = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9, nesterov=nesterov)
    params["a"].grad = torch.randn(3, dtype=torch.float64)
    optimizer.step()
    gradient = {name: torch.randn(3, dtype=torch.float64) for name in params}
    before = {name: p.detach().clone() for name, p in params.items()}
    found = direction_of(before, gradient, read_state(optimizer, params), sgd_direction)
    for name, p in params.items():
        p.grad = gradient[name].clone()
    optimizer.step()
    for name, p in params.items():
        made = (p.detach() - before[name]) / 0.1
        torch.testing.assert_close(found.total[name], made, rtol=1e-12, atol=1e-12)


def test_groups_without_a_ratio_of_rates_are_not_given_one():
    from entropy_experiments.pipelines.training_facts import with_learning_rate

    def rates(*stored):
        tensors = {name: torch.zeros(2) for name in "ab"[: len(stored)]}
        groups = [{"params": [tensors[n]], "lr": lr} for n, lr in zip(tensors, stored)]
        state = read_state(torch.optim.AdamW(groups), tensors)
        return [group.lr for group in with_learning_rate(state, 1e-5).groups]

    assert rates(1e-4, 1e-3) == pytest.approx([1e-5, 1e-4])
    assert rates(0.0, 0.0) == [1e-5, 1e-5]
    with pytest.raises(ValueError, match=r"rates 0 and 0.0001: there is no ratio to keep"):
        rates(0.0, 1e-4)


@pytest.mark.parametrize("kind", TORCH_OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_every_optimizer_that_is_read_has_its_step(kind):
    """An optimizer added to one table and not to the other is named here."""
    params, gradient, state = world(torch.float64, two_groups(kind), 3)
    direction = rebuilt_direction(params, gradient, state, max_grad_norm=0.5)
    certificate = optimizer_certificate(direction, params, gradient, state, max_grad_norm=0.5)
    assert certificate.passed
    recursion = step_recursion(params, gradient, state, max_grad_norm=0.5)
    for name, one in recursion.parameters.items():
        step = direction.lr * direction.total[name]
        assert float((one.change - step).norm()) <= PARTS * float(step.norm())
