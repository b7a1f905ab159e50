"""The Fisher kernel against explicit gradients, and what it predicts against what happens."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from entropy_experiments import (
    AdamGroup,
    Objective,
    OptimizerState,
    Rollouts,
    SequenceProcessor,
    UpdateBatch,
    compute_update_vector_adamw,
)
from entropy_experiments.attribution import fisher
from entropy_experiments.attribution.fisher import (
    fisher_blocks,
    fisher_kernel,
    logprob_changes,
    one_per_rollout,
    predicted_logprob_changes,
    rollout_coefficients,
    top_contributors,
)
from entropy_experiments.models.precision import true_float64
from entropy_experiments.numerics import rollout_gradients
from entropy_experiments.numerics.derivatives import pullback
from entropy_experiments.types import Params, Scores
from entropy_experiments.update.objective import token_coefficients
from oracles.cases import arbitrary_weights
from oracles.enumeration import all_rollouts
from oracles.tabular import TabularPolicy
from oracles.tiny_models import tiny_lora, tiny_rollouts
from tolerances import EXACT

pytestmark = pytest.mark.naive


@cache
def policy_of(kind: str) -> Any:
    if kind == "tabular":
        return TabularPolicy.random(2, vocabulary=3, horizon=2)
    return SequenceProcessor(true_float64(tiny_lora("qwen2")))


@cache
def sides_of(kind: str) -> tuple[Rollouts, Rollouts]:
    if kind == "tabular":
        everything = all_rollouts(policy_of(kind))
        some = everything.take(torch.tensor([5, 1, 3]))
        return arbitrary_weights(everything, 1), arbitrary_weights(
            Rollouts(**{**vars(some), "weight_N": None, "share": 1.0}), 2
        )
    left = tiny_rollouts(seed=1, prompts=(3, 9, 5, 4), responses=(4, 7, 2, 3))
    right = tiny_rollouts(seed=2, prompts=(2, 6, 4), responses=(5, 1, 3))
    return arbitrary_weights(left, 1), arbitrary_weights(right, 2)


@cache
def preconditioner_of(kind: str) -> Params:
    generator = torch.Generator().manual_seed(6)
    return {
        name: torch.rand(p.shape, generator=generator, dtype=torch.float64) + 0.1
        for name, p in policy_of(kind).params.items()
    }


def explicit(policy: Any, rollouts: Rollouts, cotangent: Scores | None = None) -> Tensor:
    """[N, P]: the gradient of each S_i (or of its worth) as one long row."""
    found = []
    for n in range(len(rollouts)):

        def value(params):
            l_NS, h_NS = policy.score(params, rollouts)
            mine_S = rollouts.response_NS[n]
            if cotangent is None:
                return l_NS[n][mine_S].sum()
            both_S = cotangent.logprob_NS[n] * l_NS[n] + cotangent.entropy_NS[n] * h_NS[n]
            return both_S[mine_S].sum()

        _, grads = pullback(value, policy.params)
        found.append(torch.cat([g.flatten() for g in grads.values()]))
    return torch.stack(found)


def long(params: Params) -> Tensor:
    return torch.cat([p.flatten() for p in params.values()])


def assert_near(got: Tensor, expected: Tensor, tolerance: float = EXACT) -> None:
    assert got.shape == expected.shape
    assert float((got - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.fixture(params=["tabular", "lora"])
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_kernel_of_explicit_gradients(kind, weighted, centred, cosine):
    policy, (left, right) = policy_of(kind), sides_of(kind)
    p = preconditioner_of(kind) if weighted else None
    g, k = explicit(policy, left), explicit(policy, right)
    if centred:
        g, k = g - left.weight_N @ g, k - right.weight_N @ k
    scale = long(p) if p is not None else torch.ones(g.shape[1], dtype=torch.float64)
    expected = g @ (scale * k).T
    if cosine:
        norms = [(scale * x**2).sum(1).sqrt() for x in (g, k)]
        expected = expected / norms[0][:, None] / norms[1]
    options = {"centred": centred, "cosine": cosine, "microbatch": 2}
    found = fisher_kernel(policy, left, right, p, **options)
    assert_near(found, expected)
    size = g.shape[1] * 8
    for fits in (1, 2):
        small = fisher_kernel(policy, left, right, p, block_bytes=2 * fits * size, **options)
        assert_near(small, expected)


def test_symmetric_and_positive(kind):
    policy, (left, _) = policy_of(kind), sides_of(kind)
    for centred in (False, True):
        found = fisher_kernel(policy, left, left, preconditioner_of(kind), centred=centred)
        assert_near(found, found.T)
        assert float(torch.linalg.eigvalsh(found).min()) >= -EXACT * float(found.abs().max())
        assert float(found.diagonal().min()) > 0
    # Centred over its own batch, the weighted rows sum to nothing.
    assert float((left.weight_N @ found).abs().max()) <= EXACT * float(found.abs().max())
    cosine = fisher_kernel(policy, left, left, preconditioner_of(kind), cosine=True)
    assert_near(cosine.diagonal(), torch.ones(len(left), dtype=torch.float64))
    assert float(cosine.abs().max()) <= 1 + EXACT


def test_scores_of_the_policy_have_mean_zero():
    """What centring subtracts has expectation 0: exactly so under the exact probabilities."""
    policy = policy_of("tabular")
    everything = all_rollouts(policy)
    plain, centred = (
        fisher_kernel(policy, everything, everything, centred=c) for c in (False, True)
    )
    assert_near(centred, plain)


def test_memory_stays_under_the_budget(monkeypatch):
    policy, (left, right) = policy_of("lora"), sides_of("lora")
    size, seen = sum(p.numel() * 8 for p in policy.params.values()), []

    def counted(one, other):
        seen.append(max(sum(x.numel() * 8 for x in s.values()) for s in (one, other)))
        return rollout_gradients.products(one, other)

    monkeypatch.setattr(fisher, "products", counted)
    fisher_kernel(policy, left, right, block_bytes=4 * size)
    assert max(seen) == 2 * size
    fisher_kernel(policy, left, right)
    assert max(seen) > 2 * size


def step_of(objective: Objective, *, stale: bool):
    policy, (_, right) = policy_of("lora"), sides_of("lora")
    rollouts = Rollouts(**{**vars(right), "weight_N": None})
    l_NS = policy.score_all(rollouts).logprob_NS
    generator = torch.Generator().manual_seed(9)
    noise_NS = 0.2 * torch.randn(l_NS.shape, generator=generator, dtype=torch.float64)
    advantage_N1 = torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    batch = UpdateBatch(
        rollouts=rollouts,
        advantage_NS=advantage_N1.expand(l_NS.shape).contiguous(),
        old_logprob_NS=l_NS + noise_NS if stale else None,
    )
    group = AdamGroup(
        names=tuple(policy.params), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1
    )
    generator.manual_seed(10)
    state = {
        name: {
            "step": 4.0,
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.rand(p.shape, generator=generator, dtype=torch.float64) + 0.1,
        }
        for name, p in policy.params.items()
    }
    direction, _, stats = compute_update_vector_adamw(
        policy, batch, objective, OptimizerState(groups=(group,), state=state), max_grad_norm=0.3
    )
    coefficient = token_coefficients(objective, stats.found.scores, batch)
    return policy, batch, direction, coefficient


def assert_predicts(policy, direction, predict) -> None:
    """The prediction's error falls like eta^2, and at a small eta it is the measurement."""
    left, gaps = sides_of("lora")[0], []
    for eta in (1e-2, 1e-3):
        predicted_N = predict(eta)
        measured_N = logprob_changes(policy, left, direction.only("gradient"), eta)
        gaps.append(float((predicted_N - measured_N).abs().max()))
    assert gaps[1] <= 0.02 * gaps[0]
    assert gaps[1] <= 1e-2 * float(measured_N.abs().max())


def test_predicted_logprob_changes_of_whole_rollouts():
    """At ratio 1 every token of a rollout has one coefficient: the kernel is enough."""
    policy, batch, direction, coefficient = step_of(Objective(), stale=False)
    left = sides_of("lora")[0]
    kernel = fisher_kernel(policy, left, batch.rollouts, direction.preconditioner)
    coef_M = rollout_coefficients(coefficient, batch.rollouts)
    slope_N = explicit(policy, left) @ long(direction.gradient)
    options = {"clip_factor": direction.clip_factor}
    assert direction.clip_factor < 1
    assert_near(predicted_logprob_changes(kernel, coef_M, eta=1.0, **options), slope_N)
    assert_predicts(
        policy,
        direction,
        lambda eta: predicted_logprob_changes(kernel, coef_M, eta=eta, **options),
    )
    first = top_contributors(kernel[0] * coef_M, 2)
    assert [c.rollout for c in first] == (kernel[0] * coef_M).abs().argsort()[-2:].flip(0).tolist()
    assert first[0].value == pytest.approx(float(kernel[0, first[0].rollout] * coef_M[first[0][0]]))


def test_predicted_logprob_changes_of_any_loss():
    """Clipped tokens and an entropy bonus: token coefficients go into the right side."""
    objective = Objective(clip_low=0.1, clip_high=0.1, entropy_coef=0.05)
    policy, batch, direction, coefficient = step_of(objective, stale=True)
    left = sides_of("lora")[0]
    kernel = fisher_kernel(
        policy, left, batch.rollouts, direction.preconditioner, cotangent=coefficient
    )
    assert_near(
        kernel,
        explicit(policy, left)
        @ (long(direction.preconditioner) * explicit(policy, batch.rollouts, coefficient)).T,
    )
    ones_M = torch.ones(len(batch.rollouts), dtype=torch.float64)
    slope_N = explicit(policy, left) @ long(direction.gradient)
    options = {"clip_factor": direction.clip_factor}
    assert_near(predicted_logprob_changes(kernel, ones_M, eta=1.0, **options), slope_N)
    assert_predicts(
        policy,
        direction,
        lambda eta: predicted_logprob_changes(kernel, ones_M, eta=eta, **options),
    )
    with pytest.raises(ValueError, match="token coefficients that differ"):
        rollout_coefficients(coefficient, batch.rollouts)


def test_logprob_changes_are_sums_over_the_response():
    policy, (left, _) = policy_of("lora"), sides_of("lora")
    _, _, direction, _ = step_of(Objective(), stale=False)
    moved = {n: p + 0.1 * direction.total[n] for n, p in policy.params.items()}
    found_N = logprob_changes(policy, left, direction, 0.1)
    for n in range(len(left)):
        there, here = (policy.score(p, left).logprob_NS[n] for p in (moved, policy.params))
        truth = float((there - here)[left.response_NS[n]].sum())
        assert float(found_N[n]) == pytest.approx(truth, rel=1e-9, abs=1e-12)


def test_the_right_side_is_the_policy_as_the_loss_sees_it():
    """Sampled at another temperature than it was trained at."""
    policy, (left, right) = policy_of("lora"), sides_of("lora")
    trained = SequenceProcessor(policy.model, temperature=0.7)
    p = preconditioner_of("lora")
    g, k = explicit(policy, left), explicit(trained, right)
    found = fisher_blocks(policy, left, right, p, trained=trained, microbatch=2)
    assert_near(found.value_NM, g @ (long(p) * k).T)
    assert_near(found.own_N, (long(p) * g**2).sum(1))
    assert_near(found.own_M, (long(p) * k**2).sum(1))
    plain = fisher_blocks(policy, left, right, p)
    assert float((plain.value_NM - found.value_NM).abs().max()) > 0.1  # teeth
    g, k = g - left.weight_N @ g, k - right.weight_N @ k
    found = fisher_blocks(policy, left, right, p, trained=trained, centred=True)
    assert_near(found.value_NM, g @ (long(p) * k).T)


def test_one_coefficient_per_rollout_is_told_from_many():
    for objective, stale in ((Objective(), False), (Objective(entropy_coef=0.05), False)):
        _, batch, _, coefficient = step_of(objective, stale=stale)
        single = objective.entropy_coef == 0
        assert one_per_rollout(coefficient, batch.rollouts) == single
    nothing = Scores(*(torch.zeros_like(x_NS) for x_NS in coefficient))
    assert one_per_rollout(nothing, batch.rollouts)  # no advantage at all


def test_a_zero_gradient_has_cosine_zero():
    policy, (left, right) = policy_of("tabular"), sides_of("tabular")
    nothing = Scores(*(torch.zeros(right.tokens_NS.shape, dtype=torch.float64) for _ in range(2)))
    found = fisher_kernel(policy, left, right, cotangent=nothing, cosine=True)
    assert float(found.abs().max()) == 0.0


def test_bad_requests_are_refused():
    policy, (left, right) = policy_of("tabular"), sides_of("tabular")
    negative = {name: -p for name, p in preconditioner_of("tabular").items()}
    with pytest.raises(ValueError, match="'table' has negative entries"):
        fisher_kernel(policy, left, right, negative, cosine=True)
    with pytest.raises(ValueError, match=r"preconditioner does not fit.*unknown \['a'\]"):
        fisher_kernel(policy, left, right, {"a": torch.ones(1)})
    with pytest.raises(ValueError, match="part of a batch"):
        fisher_kernel(policy, left.take(torch.tensor([0])), right)
    kernel = fisher_kernel(policy, left, right)
    with pytest.raises(ValueError, match=r"shape \(14, 3\).*\(2,\) coefficients"):
        predicted_logprob_changes(kernel, torch.ones(2), eta=0.1)
    with pytest.raises(ValueError, match=r"count 0; expected one row"):
        top_contributors(kernel[0], 0)
    with pytest.raises(ValueError, match=r"Got a kernel of shape"):
        top_contributors(kernel, 1)
