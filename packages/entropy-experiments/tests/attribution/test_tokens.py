"""Token and rollout influences against exact derivatives, PPO clip, KL and entropy bonus all on.

The truth is slow and obvious: each token's own loss, written out, is differentiated by itself,
turned into a step by Adam's textbook formula, and dotted with the gradient of the entropy of every
response that the policy can give. No code of the package computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from entropy_experiments import (
    AdamGroup,
    Direction,
    Objective,
    OptimizerState,
    Rollouts,
    UpdateBatch,
    adamw_direction,
    loss_gradient,
)
from entropy_experiments.attribution import tokens as tokens_module
from entropy_experiments.attribution.tokens import of_coefficients, token_influence
from entropy_experiments.estimate.options import slope_estimand
from entropy_experiments.types import Scores
from entropy_experiments.update.objective import token_coefficients
from oracles.cases import KINDS
from oracles.enumeration import all_rollouts, exact_entropy, plain_scores, with_weights
from tolerances import EXACT

pytestmark = pytest.mark.exact

LR, B1, B2, EPS, DECAY, STEPS, MAX_NORM = 0.03, 0.9, 0.99, 1e-8, 0.1, 4, 0.02
CLIP, BETA, BONUS = 0.2, 0.15, 0.07
LOSSES = ("grpo", "dapo", "bnpo")
LENGTH = 6


@dataclass(frozen=True)
class Problem:
    policy: Any
    trained: Any
    """The same parameters at the temperature of training."""
    evaluation: Rollouts
    batch: UpdateBatch
    optimizer: OptimizerState


@cache
def problem(kind: str, seed: int) -> Problem:
    policy, trained = (KINDS[kind](seed, temperature=t) for t in (0.7, 1.0))
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    evaluation = all_rollouts(policy)
    picked = torch.randperm(len(evaluation), generator=generator)[:7]
    rollouts = replace(evaluation.take(picked), weight_N=None, share=1.0)
    response_NS = rollouts.response_NS.clone()
    longest = int(rollouts.tokens_N.argmax())
    hole = int(response_NS[longest].nonzero().flatten()[1])
    response_NS[longest, hole] = False  # what a tool said
    rollouts = replace(rollouts, response_NS=response_NS)
    loss_NS = response_NS.clone()
    loss_NS[longest, hole + 1] = False  # drawn, but not trained on
    with torch.no_grad():
        now_NS, _ = plain_scores(trained, trained.params, rollouts)
    batch = UpdateBatch(
        rollouts=rollouts,
        advantage_NS=noise(*now_NS.shape),
        reward_N=noise(len(rollouts)),
        old_logprob_NS=now_NS + 0.3 * noise(*now_NS.shape),
        ref_logprob_NS=now_NS + 0.4 * noise(*now_NS.shape),
        microbatch_N=torch.arange(len(rollouts)) // 3,
        loss_NS=loss_NS,
    )
    group = AdamGroup(
        names=tuple(policy.params), lr=LR, betas=(B1, B2), eps=EPS, weight_decay=DECAY
    )
    state = {
        name: {
            "step": STEPS,
            "exp_avg": 0.01 * noise(*p.shape),
            "exp_avg_sq": 1e-4 * noise(*p.shape) ** 2,
        }
        for name, p in policy.params.items()
    }
    optimizer = OptimizerState(groups=(group,), state=state)
    return Problem(policy, trained, evaluation, batch, optimizer)


def objective_of(loss: str, ratio: str = "token") -> Objective:
    return Objective(
        loss=loss,  # type: ignore[arg-type]
        clip_low=CLIP,
        clip_high=CLIP,
        ratio=ratio,  # type: ignore[arg-type]
        beta=BETA,
        entropy_coef=BONUS,
        max_completion_length=LENGTH,
    )


def step_of(given: Problem, objective: Objective) -> Direction:
    gradient = loss_gradient(given.trained, given.batch, objective).gradient
    return adamw_direction(given.policy.params, gradient, given.optimizer, max_grad_norm=MAX_NORM)


def token_losses(given: Problem, params: Any, loss: str, ratio: str) -> dict[Any, torch.Tensor]:
    """The loss of each counted token, written out; their sum is the loss."""
    batch = given.batch
    l_NS, h_NS = plain_scores(given.trained, params, batch.rollouts)
    n = len(batch.rollouts)
    counted = [batch.counted_NS[i].nonzero().flatten().tolist() for i in range(n)]
    every = sum(map(len, counted))
    groups = [[j for j in range(n) if j // 3 == i // 3] for i in range(n)]
    out = {}
    for i in range(n):
        in_group = sum(len(counted[j]) for j in groups[i])
        # bnpo: the mean over microbatches of w-weighted token means, w = 1/n.
        share = (1 / n) / (len({j // 3 for j in range(n)}) * in_group / n)
        weight = {"grpo": 1 / n / max(len(counted[i]), 1), "dapo": 1 / every, "bnpo": share}[loss]
        gaps = [l_NS[i, s] - batch.old_logprob_NS[i, s] for s in counted[i]]
        for k, s in enumerate(counted[i]):
            gap = gaps[k] if ratio == "token" else sum(gaps) / len(gaps)
            r, a = gap.exp(), batch.advantage_NS[i, s]
            policy_loss = -torch.minimum(r * a, r.clamp(1 - CLIP, 1 + CLIP) * a)
            x = batch.ref_logprob_NS[i, s] - l_NS[i, s]
            kl = x.exp() - x - 1
            out[i, s] = weight * (policy_loss + BETA * kl) - BONUS * share * h_NS[i, s]
    return out


def truth(
    given: Problem, loss: str, ratio: str, unit: str
) -> tuple[dict[Any, float], dict[str, float]]:
    """Influence of each token (of its own loss), and of momentum and decay."""
    leaves = {name: p.clone().requires_grad_() for name, p in given.policy.params.items()}
    names = list(leaves)
    g_H = torch.autograd.grad(
        exact_entropy(given.policy, leaves, unit=unit), list(leaves.values()), allow_unused=True
    )
    losses = token_losses(given, leaves, loss, ratio)
    own = {
        token: torch.autograd.grad(
            value, list(leaves.values()), retain_graph=True, allow_unused=True
        )
        for token, value in losses.items()
    }

    def filled(grads: Any) -> list[torch.Tensor]:
        return [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(leaves.values(), grads, strict=True)
        ]

    g_H, own = filled(g_H), {token: filled(grads) for token, grads in own.items()}
    whole = [sum(grads[j] for grads in own.values()) for j in range(len(names))]
    norm = sum(float((g**2).sum()) for g in whole) ** 0.5
    c, t = min(1.0, MAX_NORM / (norm + 1e-6)), STEPS + 1
    assert c < 1
    influence = dict.fromkeys(own, 0.0)
    baseline = {"momentum": 0.0, "decay": 0.0}
    for j, name in enumerate(names):
        state, theta = given.optimizer.state[name], given.policy.params[name]
        s = B2 * state["exp_avg_sq"] + (1 - B2) * (c * whole[j]) ** 2
        den = (1 - B1**t) * ((s / (1 - B2**t)).sqrt() + EPS)
        baseline["momentum"] -= LR * float((g_H[j] * B1 * state["exp_avg"] / den).sum())
        baseline["decay"] -= LR * float((g_H[j] * DECAY * theta).sum())
        for token, grads in own.items():
            step = -(1 - B1) * c * grads[j] / den
            influence[token] += LR * float((g_H[j] * step).sum())
    return influence, baseline


def check(
    given: Problem,
    loss: str,
    *,
    ratio: str = "token",
    unit: str = "token",
    form: str = "to_go",
    objective: Objective | None = None,
    **changes: Any,
) -> None:
    right = objective_of(loss, ratio)
    direction = changes.pop("direction", None) or step_of(given, right)
    found = token_influence(
        given.policy,
        changes.pop("evaluation", given.evaluation),
        changes.pop("trained", given.trained),
        given.batch,
        objective or right,
        direction,
        estimand=slope_estimand(given.policy, form=form, unit=unit, prompts="fixed"),
        **{"microbatch": 64, **changes},
    )
    want, baseline = truth(given, loss, ratio, unit)
    scale = max(map(abs, want.values()))
    got_NS = found.value_NS

    def close(got: float, expected: float, what: Any) -> None:
        assert abs(got - expected) <= EXACT * scale, f"{what}: {got} and {expected}, tolerance"

    if ratio == "token":
        for (i, s), value in want.items():
            close(float(got_NS[i, s]), value, ("token", i, s))
    for i in range(len(given.batch.rollouts)):
        value = sum(v for (j, _), v in want.items() if i == j)
        close(float(found.rollout_N[i]), value, ("rollout", i))
    for part, value in baseline.items():
        close(found.baseline[part], value, part)
    close(found.total, sum(want.values()) + sum(baseline.values()), "total")
    assert int((got_NS != 0).sum()) <= len(want)
    assert not got_NS[~given.batch.counted_NS].any()


@pytest.mark.parametrize("unit", ["token", "sequence"])
@pytest.mark.parametrize("form", ["matched", "to_go"])
@pytest.mark.parametrize("kind", KINDS)
def test_influences_are_exact_derivatives(kind, form, unit):
    check(problem(kind, 0), "grpo", form=form, unit=unit)


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_so_they_are_for_every_loss(kind, loss, seed):
    check(problem(kind, seed), loss)


@pytest.mark.parametrize("kind", KINDS)
def test_and_for_a_ratio_per_sequence(kind):
    check(problem(kind, 0), "grpo", ratio="sequence")


@pytest.mark.parametrize("options", [{"mode": "double_backward"}, {"microbatch": 1}, {"folds": 1}])
def test_and_however_they_are_computed(options):
    check(problem("transformer", 0), "grpo", **options)


@pytest.mark.parametrize("form", ["matched", "to_go"])
def test_and_from_stale_evaluation_rollouts(form):
    given = problem("transformer", 1)
    direction = step_of(given, objective_of("grpo"))
    old = {name: p + 0.5 * direction.total[name] for name, p in given.policy.params.items()}
    with torch.no_grad():
        behaviour_NS, _ = plain_scores(given.policy, old, given.evaluation)
    stale = with_weights(given.evaluation, behaviour_NS.sum(1).exp())
    assert float((stale.weight_N - given.evaluation.weight_N).abs().max()) > 1e-3
    check(given, "grpo", form=form, evaluation=replace(stale, behaviour_logprob_NS=behaviour_NS))


def test_the_sum_is_the_first_order_change():
    """deltaH1 - (momentum + decay + sum over rollouts), of the sum of |parts|."""
    for kind in KINDS:
        given, objective = problem(kind, 2), objective_of("dapo")
        direction = step_of(given, objective)
        estimand = slope_estimand(given.policy, form="to_go", prompts="fixed")
        found = token_influence(
            given.policy,
            given.evaluation,
            given.trained,
            given.batch,
            objective,
            direction,
            estimand=estimand,
        )
        leaves = {name: p.clone().requires_grad_() for name, p in given.policy.params.items()}
        exact_entropy(given.policy, leaves).backward()
        slope = sum(
            float((p.grad * direction.total[n]).sum())
            for n, p in leaves.items()
            if p.grad is not None
        )
        parts = [*found.rollout_N.tolist(), *found.baseline.values()]
        assert abs(LR * slope - sum(parts)) <= 1e-12 * sum(map(abs, parts))
        assert found.cancellation == pytest.approx(sum(map(abs, parts)) / abs(sum(parts)))


def test_other_coefficients_need_no_other_pass():
    """What another objective's tokens would have done in this very step (P, c as they were)."""
    given = problem("transformer", 3)
    objective, other = objective_of("grpo"), Objective(loss="dapo", beta=0.5, clip_high=0.4)
    direction = step_of(given, objective)
    estimand = slope_estimand(given.policy, form="to_go", prompts="fixed")
    found = token_influence(
        given.policy,
        given.evaluation,
        given.trained,
        given.batch,
        objective,
        direction,
        estimand=estimand,
    )
    got = of_coefficients(found, token_coefficients(other, found.scores, given.batch))
    g_L = loss_gradient(given.trained, given.batch, other).gradient
    assert direction.preconditioner is not None
    want = (
        -LR
        * direction.clip_factor
        * sum(float((found.g_H[n] * direction.preconditioner[n] * g).sum()) for n, g in g_L.items())
    )
    assert float(got.sum()) == pytest.approx(want, rel=1e-10)
    assert torch.equal(of_coefficients(found, found.coefficient), found.value_NS)


def caught(*args: Any, **options: Any) -> None:
    """By the check's own assertion, not by a crash."""
    with pytest.raises(AssertionError, match="tolerance"):
        check(*args, **options)


class TestTeeth:
    """Each mistake, made on purpose, is seen by the checks above."""

    @pytest.fixture(autouse=True)
    def unguarded(self, monkeypatch):
        """The built-in sum rule would speak first."""
        monkeypatch.setattr(tokens_module, "_check_sum_rule", lambda found: None)

    @pytest.fixture
    def given(self):
        return problem("transformer", 0)

    def test_dropped_state_term(self, monkeypatch, given):
        right = tokens_module.entropy_coefficients
        monkeypatch.setattr(
            tokens_module, "entropy_coefficients", lambda *a: right(*a, term="direct")
        )
        caught(given, "grpo")

    def test_dropped_entropy_bonus(self, monkeypatch, given):
        right = tokens_module.token_coefficients

        def without(objective, scores, batch):
            found = right(objective, scores, batch)
            return Scores(found.logprob_NS, torch.zeros_like(found.entropy_NS))

        monkeypatch.setattr(tokens_module, "token_coefficients", without)
        caught(given, "grpo")

    def test_dropped_clip_factor(self, given):
        direction = step_of(given, objective_of("grpo"))
        assert direction.clip_factor < 0.9
        caught(given, "grpo", direction=replace(direction, clip_factor=1.0))

    def test_dropped_ppo_clip(self, given):
        unclipped = replace(objective_of("grpo"), clip_low=None, clip_high=None)
        caught(given, "grpo", objective=unclipped)

    def test_dropped_kl(self, given):
        caught(given, "grpo", objective=replace(objective_of("grpo"), beta=0.0))

    def test_the_temperature_of_measuring_for_that_of_training(self, given):
        caught(given, "grpo", trained=given.policy)

    def test_a_preconditioner_of_ones(self, given):
        direction = step_of(given, objective_of("grpo"))
        assert direction.preconditioner is not None
        ones = {name: torch.ones_like(p) for name, p in direction.preconditioner.items()}
        caught(given, "grpo", direction=replace(direction, preconditioner=ones))


@pytest.mark.parametrize("wrong", ["clip factor", "ppo clip", "kl", "trained"])
def test_what_does_not_belong_together_is_refused(wrong):
    """The same mistakes, as a user could make them: the sum rule is checked on every call."""
    given = problem("transformer", 0)
    objective = objective_of("grpo")
    changes: dict[str, Any] = {
        "clip factor": {"direction": replace(step_of(given, objective), clip_factor=1.0)},
        "ppo clip": {"objective": replace(objective, clip_low=None, clip_high=None)},
        "kl": {"objective": replace(objective, beta=0.0)},
        "trained": {"trained": given.policy},
    }[wrong]
    with pytest.raises(ValueError, match=r"influences sum to .* entropy moves by .* made with"):
        check(given, "grpo", **changes)
