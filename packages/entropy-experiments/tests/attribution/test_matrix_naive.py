"""The matrix, measured columns and leave-one-out against slow and obvious versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor

from entropy_experiments import (
    AdamGroup,
    Direction,
    Objective,
    OptimizerState,
    SequenceProcessor,
    UpdateBatch,
    compute_update_vector_adamw,
    first_order,
    measured,
)
from entropy_experiments.attribution import matrix
from entropy_experiments.attribution.finite import finite_columns
from entropy_experiments.attribution.leave_one_out import leave_one_out
from entropy_experiments.attribution.matrix import influence_matrix, update_directions
from entropy_experiments.attribution.tokens import token_influence
from entropy_experiments.estimate.gradient import entropy_coefficients, entropy_gradient
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.models.precision import true_float64
from entropy_experiments.numerics import rollout_gradients
from entropy_experiments.numerics.derivatives import dot, norm, pullback
from entropy_experiments.numerics.rollout_gradients import fitting, unstacked, weighted_sum
from entropy_experiments.sampling.advantages import EPSILON, group_advantages
from entropy_experiments.types import Estimand, Rollouts
from entropy_experiments.update.objective import token_coefficients
from oracles.tabular import TabularPolicy
from oracles.tiny_models import tiny_lora, tiny_rollouts
from tolerances import EXACT, INVARIANT

pytestmark = pytest.mark.naive

OBJECTIVE = Objective(loss="dapo", beta=0.05, entropy_coef=0.02)
FORMS = {"matched": "snis", "to_go": "per_decision"}


@dataclass(frozen=True, eq=False)
class World:
    policy: Any
    trained: Any
    evaluation: Rollouts
    batch: UpdateBatch
    optimizer: OptimizerState
    direction: Direction

    def matrix(self, estimand: Estimand, **options) -> matrix.InfluenceMatrix:
        options = {"microbatch": 4, **options}
        return influence_matrix(
            self.policy,
            self.evaluation,
            self.trained,
            self.batch,
            OBJECTIVE,
            self.direction,
            estimand=estimand,
            **options,
        )

    @property
    def shares(self) -> dict[str, Tensor]:
        found = self.trained.score_all(self.batch.rollouts)
        coefficient = token_coefficients(OBJECTIVE, found, self.batch)
        return update_directions(self.trained, self.batch, coefficient, self.direction)


def optimizer_of(params: Mapping[str, Tensor], *, lr: float = 0.02) -> OptimizerState:
    generator = torch.Generator().manual_seed(8)

    def draw(p: Tensor) -> Tensor:
        return torch.randn(p.shape, generator=generator, dtype=torch.float64)

    group = AdamGroup(names=tuple(params), lr=lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    state = {
        name: {"step": 5.0, "exp_avg": 0.01 * draw(p), "exp_avg_sq": 1e-4 * draw(p) ** 2}
        for name, p in params.items()
    }
    return OptimizerState(groups=(group,), state=state)


@cache
def world(kind: str = "lora", dtype: str = "float64") -> World:
    model = tiny_lora("qwen2", use_dora=kind == "dora")
    model = true_float64(model) if dtype == "float64" else model
    policy = SequenceProcessor(model, temperature=0.9)
    trained = SequenceProcessor(model, temperature=1.0).as_trained()
    evaluation = replace(
        tiny_rollouts(
            seed=1,
            prompts=(3, 9, 5, 4, 6, 2, 3, 9, 5, 4, 6, 2),
            responses=(4, 7, 2, 3, 1, 5, 6, 2, 3, 4, 5, 1),
        ),
        prompt_N=torch.arange(12) % 6,
    )
    rollouts = tiny_rollouts(seed=2, prompts=(4, 4, 7, 7, 3), responses=(3, 5, 2, 6, 4))
    found = trained.score_all(rollouts)
    generator = torch.Generator().manual_seed(4)

    def near(x_NS: Tensor) -> Tensor:
        return x_NS + 0.1 * torch.randn(x_NS.shape, generator=generator, dtype=torch.float64)

    advantage_N = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0], dtype=torch.float64)
    batch = UpdateBatch(
        rollouts=rollouts,
        advantage_NS=advantage_N[:, None].expand(rollouts.tokens_NS.shape).contiguous(),
        old_logprob_NS=near(found.logprob_NS),
        ref_logprob_NS=near(found.logprob_NS),
    )
    optimizer = optimizer_of(policy.params)
    direction, _, _ = compute_update_vector_adamw(
        trained, batch, OBJECTIVE, optimizer, max_grad_norm=0.1
    )
    return World(policy, trained, evaluation, batch, optimizer, direction)


def estimand_of(form: str = "per_decision", **changes) -> Estimand:
    return Estimand(temperature=0.9, form=form, **changes)


def along(world: World, v: Mapping[str, Tensor]) -> Direction:
    return Direction(parts={"share": v}, lr=world.direction.lr)


@pytest.mark.parametrize(
    ("kind", "form", "prompts"),
    [
        ("lora", "to_go", "population"),
        ("lora", "matched", "population"),
        ("lora", "to_go", "fixed"),
        ("dora", "to_go", "population"),
    ],
)
def test_columns_are_first_order_along_their_direction(kind, form, prompts):
    """The same value, error bar and influence values; the matrix's sums as well."""
    here = world(kind)
    extra = here.direction.only("momentum", "decay").parts
    found = here.matrix(estimand_of(FORMS[form], prompts=prompts), extra=extra)
    wanted = {
        **dict(enumerate(unstacked(here.shares))),
        **extra,
    }
    assert found.columns_C == tuple(wanted)
    estimates = found.columns()
    options = {"form": form, "prompts": prompts, "repackings": 0}
    sums = [*found.column_N, *(x_E.sum() for x_E in found.extra_EX.values())]
    for (column, v), in_matrix in zip(wanted.items(), sums, strict=True):
        truth = first_order(here.policy, here.evaluation, along(here, v), **options)
        slope, scale = found.slope(column), abs(truth.value) + truth.stderr
        assert abs(slope.value - truth.value) <= EXACT * scale
        assert abs(slope.stderr - truth.stderr) <= EXACT * scale
        (ours,), (theirs,) = slope.influences, truth.influences
        assert float((ours.value_C - theirs.value_C).abs().max()) <= EXACT * scale
        assert ours.key == theirs.key
        assert abs(estimates[column].value - here.direction.lr * truth.value) <= EXACT * scale
        assert abs(float(in_matrix) - here.direction.lr * truth.value) <= EXACT * scale
        assert slope.estimand == truth.estimand
    total = first_order(here.policy, here.evaluation, here.direction.only("gradient"), **options)
    everyone = found.slope(*range(5))
    assert abs(found.total - here.direction.lr * total.value) <= EXACT * abs(total.value)
    assert abs(everyone.stderr - total.stderr) <= EXACT * total.stderr
    assert torch.allclose(found.row_E.sum(), torch.tensor(found.total, dtype=torch.float64))


def test_columns_are_the_gradient_of_entropy_along_explicit_gradients():
    """No column is computed from per-rollout gradients of E here: g_H, one dot product each."""
    here, estimand = world(), estimand_of()
    g_H = entropy_gradient(here.policy, here.evaluation, estimand=estimand)
    found = here.matrix(estimand)
    for j, v in enumerate(unstacked(here.shares)):
        truth = here.direction.lr * dot(g_H, v)
        assert abs(float(found.column_N[j]) - truth) <= EXACT * abs(truth)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("form", FORMS.values())
def test_columns_are_the_influences_found_by_direction_swap(kind, form):
    """Two ways that share nothing but g_H's coefficients: per-rollout gradients, and one jvp."""
    here, estimand = world(kind), estimand_of(form)
    swapped = token_influence(
        here.policy,
        here.evaluation,
        here.trained,
        here.batch,
        OBJECTIVE,
        here.direction,
        estimand=estimand,
    )
    found = here.matrix(estimand)
    gap_N = (found.column_N - swapped.rollout_N).abs()
    assert float(gap_N.max()) <= EXACT * float(swapped.rollout_N.abs().max())


@pytest.mark.parametrize("unit", ["token", "sequence"])
def test_the_same_pass_gives_the_gradient_of_entropy_by_fold(unit):
    here, estimand = world(), estimand_of(unit=unit)
    fold_N = here.evaluation.prompt_N % 3
    size = sum(p.numel() * 8 for p in here.policy.params.values())
    found = here.matrix(estimand, fold_N=fold_N, block_bytes=4 * size)
    assert found.passes == 3
    base = score_all(here.policy, here.policy.params, here.evaluation, microbatch=8)
    cotangent = entropy_coefficients(base, here.evaluation, estimand)
    for k, mine in enumerate(found.g_K):
        inside_NS = here.evaluation.response_NS & (fold_N == k)[:, None]
        _, truth = pullback(
            lambda p: weighted_sum(here.policy.score(p, here.evaluation), cotangent, inside_NS),
            here.policy.params,
        )
        for name, g in truth.items():
            assert float((mine[name] - g).abs().max()) <= EXACT * float(g.abs().max())
    assert here.matrix(estimand).g_K == ()


def test_fp32_is_close():
    exact, plain = world().matrix(estimand_of()), world(dtype="float32").matrix(estimand_of())
    gap = float((exact.matrix_EN - plain.matrix_EN).abs().max())
    assert 0 < gap <= 1e-4 * float(exact.matrix_EN.abs().max())
    here = world(dtype="float32")
    total = first_order(here.policy, here.evaluation, here.direction.only("gradient"), repackings=0)
    lr = here.direction.lr
    assert abs(plain.total - lr * total.value) <= 1e-5 * float(plain.column_N.abs().sum())


@pytest.mark.parametrize("fits", [1, 2, 3, 5, 100])
def test_blocks_change_nothing(fits):
    here = world()
    size = sum(p.numel() * 8 for p in here.policy.params.values())
    budget = 2 * fits * size
    assert fitting(here.policy.params, budget) == fits
    extra = here.direction.only("momentum").parts
    one, many = (
        here.matrix(estimand_of(), extra=extra, **options)
        for options in ({}, {"block_bytes": budget, "microbatch": 3})
    )
    assert many.passes == ceil(6 / fits)
    for a, b in ((one.dtop_NC, many.dtop_NC), (one.matrix_EN, many.matrix_EN)):
        assert float((a - b).abs().max()) <= INVARIANT * float(a.abs().max())


def repeated(batch: UpdateBatch, times: int) -> UpdateBatch:
    rows_N = torch.arange(len(batch.rollouts)).repeat(times)
    many = batch.take(rows_N, slice(None))
    weight_N = many.rollouts.weight_N / times
    return replace(many, rollouts=replace(many.rollouts, weight_N=weight_N, share=1.0))


def test_memory_does_not_grow_with_the_update_batch(monkeypatch):
    """Every stack of gradients or directions that is made, counted in bytes."""
    here, seen = world(), []

    def bytes_of(*stacks: Mapping[str, Tensor]) -> int:
        return sum(x.numel() * x.element_size() for stack in stacks for x in stack.values())

    def gradients(*args):
        out = rollout_gradients.rollout_gradients(*args)
        seen.append(bytes_of(*out))
        return out

    def products(left, right):
        seen.append(bytes_of(right))
        return rollout_gradients.products(left, right)

    monkeypatch.setattr(matrix, "rollout_gradients", gradients)
    monkeypatch.setattr(matrix, "products", products)
    size = sum(p.numel() * 8 for p in here.policy.params.values())
    budget, largest = 8 * size, {}
    for times in (1, 4):
        seen.clear()
        bigger = replace(here, batch=repeated(here.batch, times))
        found = bigger.matrix(estimand_of(), block_bytes=budget, microbatch=8)
        assert found.matrix_EN.shape == (12, 5 * times)
        assert found.passes == ceil(5 * times / 4)
        largest[times] = max(seen)
    assert largest[1] == largest[4] == budget // 2
    seen.clear()
    bigger.matrix(estimand_of(), microbatch=8)
    assert max(seen) > budget  # without the budget it would be seen


def test_two_rollouts_that_are_copies_share_their_influence():
    here = world()
    once, twice = (
        replace(here, batch=repeated(here.batch, times)).matrix(estimand_of()) for times in (1, 2)
    )
    assert torch.allclose(twice.column_N[:5] + twice.column_N[5:], once.column_N, atol=1e-14)


@pytest.mark.parametrize("form", FORMS.values())
def test_measured_columns_are_measured_one_direction_at_a_time(form):
    here, etas, estimand = world(), (0.02, 0.1), estimand_of(form)
    shares = dict(enumerate(unstacked(here.shares)))
    chosen = {j: shares[j] for j in (4, 1, 2)}
    found = finite_columns(
        here.policy, here.evaluation, chosen, etas, estimand=estimand, grad_chunk=4, microbatch=5
    )
    assert list(found) == [(j, eta) for j in chosen for eta in etas]
    for (j, eta), estimate in found.items():
        truth = measured(
            here.policy, here.evaluation, along(here, shares[j]), eta, form=form, repackings=0
        )
        assert abs(estimate.value - truth.value) <= EXACT * abs(truth.value)
        assert abs(estimate.stderr - truth.stderr) <= EXACT * truth.stderr
        ours, theirs = (e.diagnostics["integrand_N"] for e in (estimate, truth))
        assert float((ours - theirs).abs().max()) <= EXACT
        split_N = estimate.diagnostics["contribution_N"]
        assert abs(float(split_N.sum()) - truth.value) <= EXACT * abs(truth.value)


@pytest.mark.parametrize("form", FORMS.values())
def test_measured_columns_approach_the_matrix(form):
    """Entry by entry, with an error that falls like eta; the other split does not."""
    here, estimand = world(), estimand_of(form)
    entries = here.matrix(estimand).matrix_EN[:, 3] / here.direction.lr
    v, gaps, others = unstacked(here.shares)[3], [], []
    for eta in (1e-3, 1e-4):
        found = finite_columns(here.policy, here.evaluation, {3: v}, [eta], estimand=estimand)
        told = found[3, eta].diagnostics
        gaps.append(float((told["contribution_N"] / eta - entries).abs().max()))
        others.append(float((told["integrand_N"] / eta - entries).abs().max()))
    size = float(entries.abs().max())
    assert gaps[1] < 0.2 * gaps[0]
    assert gaps[1] <= 1e-3 * size
    assert others[1] > 10 * gaps[1]


def test_measured_columns_of_a_policy_that_only_scores():
    policy = TabularPolicy.random(1, prompts=2)
    evaluation = Rollouts(
        tokens_NS=torch.tensor([[3, 1, 2, 0], [3, 2, 0, 0], [4, 4, 4, 1]]),
        attention_NS=torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]).bool(),
        response_NS=torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 1]]).bool(),
        prompt_N=torch.tensor([0, 0, 1]),
    )
    v = {"table": torch.randn(policy.params["table"].shape, dtype=torch.float64)}
    found = finite_columns(policy, evaluation, {"v": v}, [0.1], estimand=Estimand())
    truth = measured(policy, evaluation, Direction(parts={"v": v}, lr=1.0), 0.1, repackings=0)
    assert abs(found["v", 0.1].value - truth.value) <= EXACT


REWARDS = torch.tensor([1.0, 0.0, 0.0, 0.5, 1.0, 1.0, 0.25, 0.0, 0.0], dtype=torch.float64)
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])


def rule(reward_N: Tensor, prompt_N: Tensor) -> Tensor:
    """TRL's, for groups of any size."""
    out_N = torch.zeros_like(reward_N)
    for prompt in prompt_N.unique():
        mine = prompt_N == prompt
        out_N[mine] = group_advantages(reward_N[mine], int(mine.sum()))
    return out_N


def by_hand(rows: list[int], **changes) -> UpdateBatch:
    """The batch of these rollouts, as if there had never been others."""
    whole = tiny_rollouts(
        seed=3, prompts=(4, 4, 4, 6, 6, 6, 3, 3, 3), responses=(3, 5, 2, 6, 4, 1, 2, 3, 7)
    )
    rollouts = Rollouts(
        tokens_NS=whole.tokens_NS[rows],
        attention_NS=whole.attention_NS[rows],
        response_NS=whole.response_NS[rows],
        prompt_N=GROUPS[rows],
    )
    advantages = []
    for row in rows:
        mates = torch.stack([REWARDS[r] for r in rows if GROUPS[r] == GROUPS[row]])
        spread = mates.std() if len(mates) > 1 else torch.zeros(())
        advantages.append((REWARDS[row] - mates.mean()) / (spread + EPSILON))
    advantage_N1 = torch.stack(advantages)[:, None]
    return UpdateBatch(
        rollouts=rollouts,
        advantage_NS=advantage_N1.expand(rollouts.tokens_NS.shape).contiguous(),
        reward_N=REWARDS[rows],
        **changes,
    )


@pytest.mark.parametrize("loss", ["grpo", "dapo", "bnpo"])
@pytest.mark.parametrize("row", [0, 5, 8])
def test_leave_one_out_is_the_step_of_the_other_rollouts(loss, row):
    policy = world().trained
    optimizer = optimizer_of(policy.params)
    objective = Objective(loss=loss, entropy_coef=0.01)
    options = {"max_grad_norm": 0.05, "microbatch": 4}
    found = leave_one_out(
        policy, by_hand([*range(9)]), objective, optimizer, row, advantage_of=rule, **options
    )
    rest = [r for r in range(9) if r != row]
    truth, _, _ = compute_update_vector_adamw(
        policy, by_hand(rest), objective, optimizer, **options
    )
    assert found.label == "leave_one_out"
    assert found.row == row
    assert abs(found.direction.clip_factor - truth.clip_factor) <= INVARIANT
    for part, params in truth.parts.items():
        gap = {n: found.direction.parts[part][n] - x for n, x in params.items()}
        assert norm(gap) <= INVARIANT * norm(params)
    full, _, _ = compute_update_vector_adamw(
        policy, by_hand([*range(9)]), objective, optimizer, **options
    )
    # All four are other numbers: had one been kept, the comparison above would have seen it.
    before = by_hand([*range(9)]).advantage_NS[rest, 0]
    assert full.clip_factor != pytest.approx(truth.clip_factor, rel=1e-3)
    assert float((before - found.batch.advantage_NS[:, 0]).abs().max()) > 0.1
    assert float(found.batch.rollouts.weight_N[0]) == pytest.approx(1 / 8)
    assert full.preconditioner is not None
    assert found.direction.preconditioner is not None
    name = next(iter(policy.params))
    moved = found.direction.preconditioner[name] / full.preconditioner[name] - 1
    assert float(moved.abs().max()) > 1e-4


def test_a_group_of_two_leaves_one_without_advantage():
    batch = by_hand([0, 1, 3, 4])
    found = leave_one_out(
        world().trained, batch, Objective(), optimizer_of(world().policy.params), 1,
        advantage_of=rule,
    )  # fmt: skip
    assert float(found.batch.advantage_NS[0].abs().max()) == 0.0


def test_what_cannot_be_left_out():
    policy, optimizer = world().trained, optimizer_of(world().policy.params)

    def ask(batch, row=0, advantage_of=rule):
        leave_one_out(policy, batch, Objective(), optimizer, row, advantage_of=advantage_of)

    batch = by_hand([*range(9)])
    with pytest.raises(ValueError, match="Rollout 9 of 9 cannot be left out"):
        ask(batch, 9)
    with pytest.raises(ValueError, match="Rollout 0 of 1 cannot be left out"):
        ask(by_hand([0]))
    with pytest.raises(ValueError, match="no reward_N"):
        ask(replace(batch, reward_N=None))
    with pytest.raises(
        ValueError, match=r"gives 0\.666.* for rollout 0, where the batch has 1\.15"
    ):
        ask(batch, advantage_of=lambda r_N, p_N: r_N - rule(r_N, p_N) * 0 - 1 / 3)
    with pytest.raises(ValueError, match=r"gave shape \(1,\) for 9 rewards"):
        ask(batch, advantage_of=lambda r_N, p_N: r_N[:1])


def test_bad_requests_are_refused():
    here, estimand = world(), estimand_of()
    with pytest.raises(ValueError, match="no preconditioner"):
        replace(here, direction=along(here, here.direction.total)).matrix(estimand)
    with pytest.raises(ValueError, match=r"extra direction 'x' does not fit.*unknown \['a'\]"):
        here.matrix(estimand, extra={"x": {"a": torch.ones(1)}})
    others = compute_update_vector_adamw(
        here.trained, here.batch, Objective(), here.optimizer, max_grad_norm=0.1
    )
    with pytest.raises(ValueError, match=r"shares miss the step's gradient part"):
        replace(here, direction=others[0]).matrix(estimand)
    with pytest.raises(ValueError, match=r"fold_N has shape \(3,\) .* each of the 12"):
        here.matrix(estimand, fold_N=torch.arange(3))
    with pytest.raises(ValueError, match="block_bytes is 0"):
        here.matrix(estimand, block_bytes=0)
    found = here.matrix(estimand)
    with pytest.raises(KeyError, match="no column 7; it has update rollouts 0 to 4"):
        found.columns([7])
    found_scores = here.trained.score_all(here.batch.rollouts)
    with pytest.raises(ValueError, match=r"rows is \[5\]; expected .* 0 to 4"):
        update_directions(here.trained, here.batch, found_scores, here.direction, rows=[5])

    def finite(etas=(0.1,), directions=None, **options):
        options = {"estimand": estimand, **options}
        finite_columns(here.policy, here.evaluation, directions or {}, etas, **options)

    with pytest.raises(ValueError, match=r"etas is \[\]"):
        finite(etas=())
    with pytest.raises(ValueError, match="grad_chunk is 0"):
        finite(grad_chunk=0)
    for refuse in (here.matrix, lambda estimand: finite(estimand=estimand)):
        with pytest.raises(ValueError, match="form 'resampled', which has no slope"):
            refuse(estimand_of("resampled"))
        with pytest.raises(ValueError, match=r"has temperature 1 and .* the policy has 0\.9"):
            refuse(Estimand())
    with pytest.raises(ValueError, match="direction 2 does not fit"):
        finite(directions={2: {"a": torch.ones(1)}})
