"""What estimators do besides being exact: clips, noise floors, fp32, masks, live parameters."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from entropy_experiments import (
    Case,
    Objective,
    Scores,
    UpdateBatch,
    curvature,
    first_order,
    loss_gradient,
    measured_many,
    token_coefficients,
)
from oracles.cases import case, random_direction
from oracles.enumeration import all_rollouts, exact_taylor
from oracles.naive import rows
from oracles.transformer import TransformerPolicy

pytestmark = pytest.mark.naive

FIXED = {"prompts": "fixed", "repackings": 0, "microbatch": 64}


@pytest.mark.parametrize("form", ["snis", "per_decision"])
def test_clipped_log_weights_by_loops(form):
    """Several clips in one call, each as if every log-weight were cut at it."""
    found = case("tabular", 0, 1.0)
    policy, rollouts, direction = found.policy, found.rollouts, found.direction
    eta, clips = 0.3, (None, 0.1, 0.2)
    got = measured_many(policy, rollouts, {"v": direction}, [eta], form=form, clips=clips, **FIXED)
    moved = {k: p + eta * direction.total[k] for k, p in policy.params.items()}
    with torch.no_grad():
        old, new = (policy.score(p, rollouts) for p in (policy.params, moved))
    old_l, new_l, old_h, new_h = (
        rows(x, rollouts) for x in (old.logprob_NS, new.logprob_NS, old.entropy_NS, new.entropy_NS)
    )
    for clip in clips:

        def cut(x, clip=clip):
            return math.exp(x if clip is None else max(-clip, min(clip, x)))

        tops, bottoms = [0.0, 0.0], [0.0, 0.0]
        for i, w in enumerate(rollouts.weight_N.tolist()):
            ratios = [float(a - b) for a, b in zip(new_l[i], old_l[i])]
            for k in range(len(ratios)):
                weight = cut(sum(ratios) if form == "snis" else sum(ratios[:k]))
                tops[0] += w * weight * float(new_h[i][k])
                bottoms[0] += w * weight
                tops[1] += w * float(old_h[i][k])
                bottoms[1] += w
        want = tops[0] / bottoms[0] - tops[1] / bottoms[1]
        estimate = got[Case("v", eta, clip)]
        assert estimate.value == pytest.approx(want, rel=1e-9, abs=1e-12)
        assert (estimate.diagnostics["weights"].clip_fraction > 0) == (clip is not None)
    assert len({e.value for e in got.values()}) == 3


def test_noise_floor_is_that_of_fp32():
    """Rounding of single precision: far above fp64's, far below any change worth measuring."""
    floors = {}
    for dtype in (torch.float32, torch.float64):
        # Wide enough that matrix products are blocked differently in different packings.
        policy = TransformerPolicy(1, dtype=dtype, width=64)
        rollouts, direction = all_rollouts(policy), random_direction(policy, 1, size=0.05)
        common = {"prompts": "fixed", "microbatch": 7}
        (change,) = measured_many(policy, rollouts, {"v": direction}, [0.01], **common).values()
        floors[dtype] = (
            change.noise_floor,
            first_order(policy, rollouts, direction, **common).noise_floor,
            first_order(policy, rollouts, direction, mode="reverse", **common).noise_floor,
        )
    for single, double in zip(floors[torch.float32], floors[torch.float64]):
        assert 1e-10 < single < 1e-5
        assert double < 1e-5 * single


def test_fp32_estimates_are_close_to_the_truth():
    """jvp 1e-5, differences of forwards 1e-2, curvature 1e-3, on a transformer in fp32."""
    for seed in range(5):
        exact = TransformerPolicy(seed)
        v64 = random_direction(exact, seed)
        _, slope, bend = exact_taylor(exact, exact.params, v64.total)
        policy = TransformerPolicy(seed, dtype=torch.float32)
        rollouts, direction = all_rollouts(exact), random_direction(policy, seed)
        for mode, tolerance in (("jvp", 1e-5), ("double_backward", 1e-5), ("central", 1e-2)):
            got = first_order(policy, rollouts, direction, mode=mode, **FIXED)
            assert abs(got.value - slope) < tolerance * max(abs(slope), 0.1), (seed, mode)
        got = curvature(policy, rollouts, direction, **FIXED)
        assert abs(got.value - bend) < 1e-3 * max(abs(bend), 1.0), seed


def test_linear_range_at_the_unfavourable_end():
    found = case("transformer", 0, 1.0)
    sample = replace(found.rollouts, weight_N=None)
    bend = curvature(found.policy, sample, found.direction, **FIXED)
    slope = bend.diagnostics["slope"].value
    worst = max(abs(end) for end in bend.interval)
    assert bend.diagnostics["linear_range_low"] == pytest.approx(0.2 * abs(slope) / worst)
    assert bend.diagnostics["linear_range_low"] < bend.diagnostics["linear_range"]


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_kl_estimators(kl):
    """-log r, (log r)^2 / 2 and r - 1 - log r with r = pi_ref / pi, and their derivatives."""
    found = case("tabular", 0, 1.0)
    rollouts, scores = found.rollouts, found.policy.score(found.policy.params, found.rollouts)
    generator = torch.Generator().manual_seed(0)
    noise_NS = torch.randn(rollouts.tokens_NS.shape, generator=generator, dtype=torch.float64)
    ref_NS = scores.logprob_NS + noise_NS
    batch = UpdateBatch(
        rollouts=rollouts, advantage_NS=torch.zeros_like(noise_NS), ref_logprob_NS=ref_NS
    )
    objective = Objective(loss="reinforce", beta=0.5, kl=kl)
    value = {"k1": lambda x: -x, "k2": lambda x: x**2 / 2, "k3": lambda x: x.exp() - 1 - x}[kl]
    slope = {"k1": lambda x: 1 + 0 * x, "k2": lambda x: -x, "k3": lambda x: 1 - x.exp()}[kl]
    weight_NS = torch.where(rollouts.response_NS, rollouts.weight_N[:, None], 0.0)
    expected = 0.5 * (weight_NS * value(noise_NS)).sum()
    assert float(objective(scores, batch)) == pytest.approx(float(expected), rel=1e-12)
    got_NS = token_coefficients(objective, scores, batch).logprob_NS
    assert torch.allclose(got_NS, 0.5 * weight_NS * slope(noise_NS), rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("loss", ["reinforce", "grpo", "bnpo", "dr_grpo", "dapo"])
def test_weight_two_is_a_rollout_twice(loss):
    """Weights mean what they say in every normaliser, the entropy bonus too."""
    found = case("tabular", 1, 1.0)
    rollouts = found.rollouts.take(torch.arange(6))
    weight_N = torch.tensor([2.0, 1, 1, 1, 1, 1], dtype=torch.float64) / 7
    weighted = replace(rollouts, weight_N=weight_N, share=1.0)
    twice_N = torch.tensor([0, 0, 1, 2, 3, 4, 5])
    repeated = replace(rollouts.take(twice_N), weight_N=None, share=1.0)
    generator = torch.Generator().manual_seed(0)
    shape = rollouts.tokens_NS.shape
    advantage_NS = torch.randn(shape, generator=generator, dtype=torch.float64)
    objective = Objective(loss=loss, entropy_coef=0.1, max_completion_length=5)
    losses = []
    for sample, index_N in ((weighted, torch.arange(6)), (repeated, twice_N)):
        batch = UpdateBatch(rollouts=sample, advantage_NS=advantage_NS[index_N])
        losses.append(loss_gradient(found.policy, batch, objective).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_masked_rollouts_do_not_count():
    """As TRL's mask_truncated_completions: not in the sum, not in the count of tokens."""
    found = case("tabular", 2, 1.0)
    rollouts = replace(found.rollouts.take(torch.arange(8)), weight_N=None, share=1.0)
    generator = torch.Generator().manual_seed(0)
    advantage_NS = torch.randn(rollouts.tokens_NS.shape, generator=generator).double()
    loss_NS = rollouts.response_NS.clone()
    loss_NS[5:] = False
    masked = UpdateBatch(rollouts=rollouts, advantage_NS=advantage_NS, loss_NS=loss_NS)
    kept = replace(rollouts.take(torch.arange(5)), weight_N=None, share=1.0)
    alone = UpdateBatch(rollouts=kept, advantage_NS=advantage_NS[:5])
    objective = Objective(loss="dapo", entropy_coef=0.1)
    a, b = (loss_gradient(found.policy, batch, objective) for batch in (masked, alone))
    assert a.loss == pytest.approx(b.loss, rel=1e-12)
    grpo = Objective(loss="grpo")
    a, b = (loss_gradient(found.policy, batch, grpo).loss for batch in (masked, alone))
    assert a == pytest.approx(b * 5 / 8, rel=1e-12)


def test_garbage_scores_in_the_padding_reach_no_number():
    """A policy may leave anything outside the response, NaN included."""
    clean = TransformerPolicy(2)

    class Untidy(TransformerPolicy):
        def score(self, params, rollouts):
            scores = super().score(params, rollouts)
            return Scores(*(torch.where(rollouts.response_NS, x, torch.nan) for x in scores))

    untidy, rollouts = Untidy(2), all_rollouts(clean)
    direction = random_direction(clean, 2)
    for options in ({}, {"mode": "reverse"}, {"baseline": True}, {"form": "matched"}):
        a, b = (
            first_order(policy, rollouts, direction, **options, **FIXED).value
            for policy in (untidy, clean)
        )
        assert a == pytest.approx(b, rel=1e-12)
    batch = UpdateBatch(
        rollouts=rollouts, advantage_NS=torch.ones(rollouts.tokens_NS.shape, dtype=torch.float64)
    )
    objective = Objective(loss="grpo", entropy_coef=0.1)
    a, b = (loss_gradient(policy, batch, objective).loss for policy in (untidy, clean))
    assert a == pytest.approx(b, rel=1e-12)


def test_live_parameters_are_left_alone():
    """nn.Parameters that require grad: no graph, no .grad, no warning, no change."""
    policy = TransformerPolicy(0)
    policy.model.requires_grad_(True)
    policy.params = dict(policy.model.named_parameters())
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in policy.params.values())
    before = {name: p.detach().clone() for name, p in policy.params.items()}
    rollouts, direction = all_rollouts(policy), random_direction(policy, 0)
    first_order(policy, rollouts, direction, **FIXED)
    first_order(policy, rollouts, direction, mode="reverse", **FIXED)
    curvature(policy, rollouts, direction, **FIXED)
    measured_many(policy, rollouts, {"v": direction}, [0.1], **FIXED)
    for name, p in policy.params.items():
        assert p.grad is None
        assert torch.equal(p, before[name])
