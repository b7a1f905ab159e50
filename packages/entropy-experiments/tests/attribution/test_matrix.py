"""The influence matrix against exact derivatives, on policies small enough to enumerate.

Evaluation rollouts are every response with its probability, so a column's sum must be the exact
derivative of the true entropy along that update rollout's share of the step. The shares come from
a loss written out here in loops, with PPO clipping, a KL term and an entropy bonus all at work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from entropy_experiments import AdamGroup, Objective, OptimizerState, UpdateBatch
from entropy_experiments.attribution.matrix import influence_matrix, update_directions
from entropy_experiments.types import Direction, Estimand, Params, Rollouts
from entropy_experiments.update.adamw import adamw_direction
from entropy_experiments.update.gradient import loss_gradient
from entropy_experiments.update.objective import token_coefficients
from oracles.cases import KINDS, arbitrary_weights
from oracles.enumeration import all_rollouts, exact_slope, plain_scores
from oracles.naive import rows
from tolerances import EXACT, assert_exact

pytestmark = pytest.mark.exact

OBJECTIVE = Objective(loss="grpo", clip_low=0.1, clip_high=0.15, beta=0.3, entropy_coef=0.2)
UPDATE_ROLLOUTS = 6
FORMS = ("snis", "per_decision")


@dataclass(frozen=True, eq=False)
class World:
    policy: Any
    evaluation: Rollouts
    batch: UpdateBatch
    direction: Direction


@cache
def world(kind: str, seed: int) -> World:
    policy = KINDS[kind](seed, temperature=0.7)
    everything = all_rollouts(policy)
    generator = torch.Generator().manual_seed(seed)

    def draw(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    chosen_N = torch.randperm(len(everything), generator=generator)[:UPDATE_ROLLOUTS]
    taken = everything.take(chosen_N)
    rollouts = Rollouts(
        tokens_NS=taken.tokens_NS,
        attention_NS=taken.attention_NS,
        response_NS=taken.response_NS,
        prompt_N=taken.prompt_N,
    )
    with torch.no_grad():
        l_NS, _ = plain_scores(policy, policy.params, rollouts)
    batch = UpdateBatch(
        rollouts=rollouts,
        advantage_NS=draw(taken.weight_N)[:, None].expand(l_NS.shape).contiguous(),
        # Ratios around 1, some of them clipped.
        old_logprob_NS=l_NS + 0.15 * draw(l_NS),
        ref_logprob_NS=l_NS + 0.3 * draw(l_NS),
    )
    optimizer = OptimizerState(
        groups=(
            AdamGroup(
                names=tuple(policy.params), lr=0.03, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1
            ),
        ),
        state={
            name: {"step": 7.0, "exp_avg": 0.1 * draw(p), "exp_avg_sq": 0.1 * draw(p) ** 2}
            for name, p in policy.params.items()
        },
    )
    gradient = loss_gradient(policy, batch, OBJECTIVE).gradient
    direction = adamw_direction(policy.params, gradient, optimizer, max_grad_norm=0.05)
    assert direction.clip_factor < 1
    return World(policy, everything, batch, direction)


def plain_loss(world: World, params: Params, j: int) -> Tensor:
    """Rollout j's term of the loss, token by token."""
    batch, o = world.batch, OBJECTIVE
    logp, h = (
        rows(x, batch.rollouts)[j] for x in plain_scores(world.policy, params, batch.rollouts)
    )
    old, ref, advantage = (
        rows(x, batch.rollouts)[j]
        for x in (batch.old_logprob_NS, batch.ref_logprob_NS, batch.advantage_NS)
    )
    n, tokens = len(batch.rollouts), int(batch.rollouts.tokens_N.sum())
    total = torch.zeros((), dtype=torch.float64)
    for k in range(len(logp)):
        ratio = torch.exp(logp[k] - old[k])
        clipped = ratio.clamp(1 - o.clip_low, 1 + o.clip_high)
        loss = -torch.min(ratio * advantage[k], clipped * advantage[k])
        gap = ref[k] - logp[k]
        loss = loss + o.beta * (gap.exp() - gap - 1)
        total = total + loss / (n * len(logp)) - o.entropy_coef * h[k] / tokens
    return total


def plain_share(world: World, j: int) -> Params:
    """v_j = -P c grad of rollout j's term."""
    leaves = {n: p.detach().clone().requires_grad_() for n, p in world.policy.params.items()}
    grads = torch.autograd.grad(plain_loss(world, leaves, j), tuple(leaves.values()))
    p, c = world.direction.preconditioner, world.direction.clip_factor
    assert p is not None
    return {name: -c * p[name] * g for name, g in zip(leaves, grads, strict=True)}


def plain_terms(world: World, rollouts: Rollouts, params: Params, form: str, unit: str):
    """A_i and B_i as functions of the parameters, by loops."""
    new_l, new_h = (rows(x, rollouts) for x in plain_scores(world.policy, params, rollouts))
    with torch.no_grad():
        old_l = rows(plain_scores(world.policy, world.policy.params, rollouts)[0], rollouts)
    tops, bottoms = [], []
    for logp, h, old in zip(new_l, new_h, old_l, strict=True):
        before, top, count = torch.ones((), dtype=torch.float64), 0.0, 0.0
        for k in range(len(logp)):
            top, count = top + before * h[k], count + before
            before = before * torch.exp(logp[k] - old[k])
        if form == "snis":
            top, count = before * sum(h), before * len(h)
        tops.append(top)
        if unit == "sequence":
            count = before if form == "snis" else torch.ones((), dtype=torch.float64)
        bottoms.append(count)
    return torch.stack(tops), torch.stack(bottoms)


@cache
def found_in(world: World, form: str, unit: str = "token", *, arbitrary: bool = False):
    estimand = Estimand(prompts="fixed", temperature=0.7, form=form, unit=unit)
    return influence_matrix(
        world.policy,
        arbitrary_weights(world.evaluation, 3) if arbitrary else world.evaluation,
        world.policy,
        world.batch,
        OBJECTIVE,
        world.direction,
        estimand=estimand,
        microbatch=16,
        extra=world.direction.only("momentum", "decay").parts,
    )


@pytest.fixture(params=[(k, s) for k in KINDS for s in range(2)], ids=str)
def case(request) -> World:
    return world(*request.param)


def test_directions_are_the_shares_of_the_step(case):
    scores = loss_gradient(case.policy, case.batch, OBJECTIVE).scores
    coefficient = token_coefficients(OBJECTIVE, scores, case.batch)
    stack = update_directions(case.policy, case.batch, coefficient, case.direction, microbatch=4)
    for j in range(UPDATE_ROLLOUTS):
        for name, v in plain_share(case, j).items():
            assert float((stack[name][j] - v).abs().max()) <= EXACT * float(v.abs().max() + 1e-3)
    for name, whole in case.direction.gradient.items():
        assert float((stack[name].sum(0) - whole).abs().max()) <= EXACT * float(whole.abs().max())
    some = update_directions(case.policy, case.batch, coefficient, case.direction, rows=[4, 1])
    for name, values in some.items():
        assert torch.allclose(values, stack[name][[4, 1]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("unit", ["token", "sequence"])
@pytest.mark.parametrize("form", FORMS)
def test_columns_are_exact_derivatives_of_the_true_entropy(case, form, unit):
    found = found_in(case, form, unit)
    for j in range(UPDATE_ROLLOUTS):
        v = plain_share(case, j)
        truth = case.direction.lr * exact_slope(case.policy, case.policy.params, v, unit=unit)
        assert_exact(float(found.column_N[j]), truth)
        assert_exact(found.columns([j])[j].value, truth)
    whole = exact_slope(case.policy, case.policy.params, case.direction.gradient, unit=unit)
    assert_exact(found.total, case.direction.lr * whole)
    assert_exact(found.slope(*range(UPDATE_ROLLOUTS)).value, whole)


@pytest.mark.parametrize("unit", ["token", "sequence"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_exact_derivatives_of_their_terms(kind, form, unit):
    """Under weights that are nobody's probabilities, so that no mistake averages out."""
    case = world(kind, 0)
    found = found_in(case, form, unit, arbitrary=True)
    evaluation = found.evaluation
    w_N, params = evaluation.weight_N, case.policy.params
    for j in (0, 3):
        v = plain_share(case, j)

        def terms(e):
            moved = {name: value + e * v[name] for name, value in params.items()}
            return plain_terms(case, evaluation, moved, form, unit)

        e = torch.zeros((), dtype=torch.float64)
        (a_N, b_N), (da_N, db_N) = torch.func.jvp(terms, (e,), (torch.ones_like(e),))
        bottom = (w_N * b_N).sum()
        expected_N = w_N * (da_N - (w_N * a_N).sum() / bottom * db_N) / bottom
        gap = (found.matrix_EN[:, j] - case.direction.lr * expected_N).abs().max()
        assert float(gap) <= EXACT * case.direction.lr * float(expected_N.abs().max())


def test_extra_directions_ride_along(case):
    found = found_in(case, "per_decision")
    lr, params = case.direction.lr, case.policy.params
    sums = {name: float(x_E.sum()) for name, x_E in found.extra_EX.items()}
    assert set(sums) == {"momentum", "decay"}
    for part, value in sums.items():
        assert_exact(value, lr * exact_slope(case.policy, params, case.direction.parts[part]))
    whole = lr * exact_slope(case.policy, params, case.direction.total)
    assert abs(found.total + sum(sums.values()) - whole) <= 1e-9 * (
        sum(map(abs, sums.values())) + float(found.column_N.abs().sum())
    )


def test_the_oracle_has_teeth(case):
    """Forgetting the centring on H, or the entropy bonus, would be seen."""
    found = found_in(case, "per_decision")
    entries, weight_N = found.matrix_EN, case.evaluation.weight_N
    bottom = float((weight_N * found.bottom_N).sum())
    uncentred = found.lr * weight_N[:, None] * found.dtop_NC[:, :UPDATE_ROLLOUTS] / bottom
    assert float((uncentred - entries).abs().max()) > 0.01 * float(entries.abs().max())
    plain = Objective(loss="grpo", clip_low=0.1, clip_high=0.15, beta=0.3)
    scores = loss_gradient(case.policy, case.batch, OBJECTIVE).scores
    coefficient = token_coefficients(plain, scores, case.batch)
    stack = update_directions(case.policy, case.batch, coefficient, case.direction)
    gaps = [
        float((stack[name][0] - v).abs().max() / (v.abs().max() + 1e-12))
        for name, v in plain_share(case, 0).items()
    ]
    assert max(gaps) > 1e-3
