"""The ledger's lines against exact derivatives, with clipping, KL and entropy bonus on.

The loss of each line is written out here once more, in plain tensors, and differentiated by plain
autograd; its share of the step is then put through the exact entropy (or expected reward) of a
policy whose every response is listed.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch

from entropy_experiments import (
    Direction,
    Objective,
    UpdateBatch,
    compute_update_vector_adamw,
    curvature,
    first_order,
    measured,
    read_state,
    token_coefficients,
)
from entropy_experiments.attribution import ledger as ledger_module
from entropy_experiments.attribution import terms as lines_module
from entropy_experiments.attribution.eventual import momentum_of
from entropy_experiments.attribution.ledger import LINES, entropy_ledger, reward_ledger
from entropy_experiments.attribution.matrix import influence_matrix
from entropy_experiments.attribution.terms import line_coefficients, line_directions
from entropy_experiments.estimate.reward import reward_slope, reward_slope_by_prompt
from entropy_experiments.numerics.derivatives import norm
from entropy_experiments.types import AdamGroup, OptimizerState, SGDGroup
from entropy_experiments.types.direction import sum_of
from estimate.test_reward import exact_reward, rewards_of, taylor
from oracles.cases import KINDS
from oracles.enumeration import all_rollouts, exact_change, exact_slope, exact_taylor, plain_scores
from oracles.tabular import TabularPolicy
from oracles.transformer import TransformerPolicy
from tolerances import EXACT, PARTS, assert_close, assert_exact

pytestmark = pytest.mark.exact

B1, LR, MAX_NORM = 0.9, 0.005, 0.05
FIXED = {"prompts": "fixed", "microbatch": 64}
OBJECTIVES = {
    "grpo": Objective(beta=0.3, kl="k3", entropy_coef=0.2),
    "dapo": Objective(
        loss="dapo", ratio="sequence", beta=0.5, kl="k2", entropy_coef=0.1, clip_high=0.28
    ),
    "dr_grpo": Objective(
        loss="dr_grpo", beta=0.2, kl="k1", entropy_coef=-0.1, max_completion_length=4
    ),
    "bare": Objective(),
}


class World:
    """A policy, the batch that trains it at another temperature, and the step."""

    def __init__(self, kind, seed, name):
        self.policy = KINDS[kind](seed, temperature=0.7)
        self.trained = KINDS[kind](seed, temperature=1.0)
        self.evaluation, self.objective = all_rollouts(self.policy), OBJECTIVES[name]
        self.batch = stale_batch(self.trained, seed)
        live = {k: p.detach().clone().requires_grad_() for k, p in self.policy.params.items()}
        optimizer = torch.optim.AdamW(live.values(), lr=LR, betas=(B1, 0.99), weight_decay=0.1)
        generator = torch.Generator().manual_seed(seed)
        for p in live.values():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
        self.optimizer = read_state(optimizer, live)
        self.direction, _, self.stats = compute_update_vector_adamw(
            self.trained,
            self.batch,
            self.objective,
            self.optimizer,
            max_grad_norm=MAX_NORM,
            microbatch=64,
        )
        assert self.direction.clip_factor < 1
        self.reward_N = rewards_of(self.evaluation, seed)
        self.given = (self.trained, self.batch, self.objective, self.direction)

    def ledger(self, **options):
        options = {"momentum_decay": B1, **FIXED, **options}
        return entropy_ledger(self.policy, self.evaluation, *self.given, **options)

    def rewards(self, **options):
        options = {"momentum_decay": B1, **FIXED, **options}
        return reward_ledger(self.policy, self.evaluation, self.reward_N, *self.given, **options)


world = cache(World)


def stale_batch(policy, seed):
    """Drawn by an older policy: ratios on both sides of the clip, advantages of both signs."""
    generator = torch.Generator().manual_seed(4000 + seed)

    def noise(size):
        shape = rollouts.tokens_NS.shape
        return size * torch.randn(shape, generator=generator, dtype=torch.float64)

    rollouts = all_rollouts(policy)
    with torch.no_grad():
        now_NS = policy.score(policy.params, rollouts).logprob_NS
    advantage_N = torch.randn(len(rollouts), generator=generator, dtype=torch.float64)
    advantage_N[::7] = 0.0
    return UpdateBatch(
        rollouts=rollouts,
        advantage_NS=advantage_N[:, None].expand(rollouts.tokens_NS.shape),
        old_logprob_NS=now_NS + noise(0.3),
        ref_logprob_NS=now_NS + noise(0.5),
        reward_N=advantage_N,
    )


def plain_losses(w, params):
    """Every line's loss, written out."""
    o, batch, rollouts = w.objective, w.batch, w.batch.rollouts
    l_NS, h_NS = plain_scores(w.trained, params, rollouts)
    inside_NS, weight_N1 = rollouts.response_NS, rollouts.weight_N[:, None]
    tokens_N1 = rollouts.tokens_N[:, None].double()
    total = (weight_N1 * tokens_N1).sum()
    per_token = {"grpo": 1 / tokens_N1, "dapo": 1 / total, "dr_grpo": torch.tensor(1 / 4)}[o.loss]
    log_ratio_NS = torch.where(inside_NS, l_NS - batch.old_logprob_NS, 0.0)
    if o.ratio == "sequence":
        log_ratio_NS = (log_ratio_NS.sum(1, keepdim=True) / tokens_N1).expand_as(l_NS)
    ratio_NS, advantage_NS = log_ratio_NS.exp(), batch.advantage_NS
    kept_NS = ratio_NS.clamp(1 - o.clip_low, 1 + o.clip_high)
    policy_NS = -torch.minimum(ratio_NS * advantage_NS, kept_NS * advantage_NS)
    gap_NS = torch.where(inside_NS, batch.ref_logprob_NS - l_NS, 0.0)
    kl_NS = {"k1": -gap_NS, "k2": gap_NS**2 / 2, "k3": gap_NS.exp() - gap_NS - 1}[o.kl]

    def summed(x_NS):
        return torch.where(inside_NS, weight_N1 * per_token * x_NS, 0.0).sum()

    losses = {
        "positive": summed(torch.where(advantage_NS > 0, policy_NS, 0.0)),
        "negative": summed(torch.where(advantage_NS < 0, policy_NS, 0.0)),
    }
    if o.beta:
        losses["kl"] = o.beta * summed(kl_NS)
    if o.entropy_coef:
        bonus = torch.where(inside_NS, weight_N1 * h_NS, 0.0).sum() / total
        losses["entropy_bonus"] = -o.entropy_coef * bonus
    return losses


def plain_directions(w):
    """momentum, decay, and -P c grad of every loss above."""
    leaves = {k: p.detach().clone().requires_grad_() for k, p in w.policy.params.items()}
    out = {part: w.direction.parts[part] for part in ("momentum", "decay")}
    for name, loss in plain_losses(w, leaves).items():
        grads = torch.autograd.grad(loss, tuple(leaves.values()), retain_graph=True)
        out[name] = {
            k: -w.direction.preconditioner[k] * w.direction.clip_factor * g
            for k, g in zip(leaves, grads)
        }
    return out


WORLDS = [(k, s, o) for k in KINDS for s in range(2) for o in OBJECTIVES]


@pytest.fixture(params=WORLDS, ids=str)
def any_world(request):
    return world(*request.param)


@pytest.fixture
def one():
    return world("transformer", 0, "grpo")


def test_the_worlds_clip_and_have_every_line():
    w = world("transformer", 0, "grpo")
    now_NS = w.trained.score(w.trained.params, w.batch.rollouts).logprob_NS
    ratio_NS = (now_NS - w.batch.old_logprob_NS).exp()[w.batch.rollouts.response_NS]
    assert (ratio_NS > 1.2).any()
    assert (ratio_NS < 0.8).any()
    assert tuple(w.ledger().lines) == LINES


def check_lines(w):
    """Each line is lr times the exact slope along its own share of the step."""
    params, expected = w.policy.params, plain_directions(w)
    for unit, form in (("token", "to_go"), ("sequence", "matched")):
        found = w.ledger(unit=unit, form=form)
        assert list(found.lines) == [name for name in LINES if name in expected]
        for name, line in found.lines.items():
            truth = LR * exact_slope(w.policy, params, expected[name], unit=unit)
            assert_exact(line.value, truth)
        _, slope, bend = exact_taylor(w.policy, params, w.direction.total, unit=unit)
        change = exact_change(w.policy, params, w.direction.total, LR, unit=unit)
        assert_exact(found.predicted.value, LR * slope)
        assert_exact(found.curvature.value, LR**2 / 2 * bend)
        assert_exact(found.measured.value, change)
        assert_exact(found.unexplained.value, change - LR * slope - LR**2 / 2 * bend)


def test_lines_are_exact(any_world):
    check_lines(any_world)


def check_reward_lines(w):
    def at(params):
        return exact_reward(w.policy, params, w.evaluation, w.reward_N)

    found = w.rewards()
    for name, v in plain_directions(w).items():
        assert_exact(found.lines[name].value, LR * taylor(at, w.policy, v)[1])
    _, slope, bend = taylor(at, w.policy, w.direction.total)
    moved = {k: p + LR * w.direction.total[k] for k, p in w.policy.params.items()}
    change = float(at(moved) - at(w.policy.params))
    assert_exact(found.predicted.value, LR * slope)
    assert_exact(found.curvature.value, LR**2 / 2 * bend)
    assert_exact(found.measured.value, change)
    assert_exact(found.unexplained.value, change - LR * slope - LR**2 / 2 * bend)
    assert found.quantity == "reward"


def test_reward_lines_are_exact(any_world):
    check_reward_lines(any_world)


def test_directions_sum_to_the_step(any_world):
    w, expected = any_world, plain_directions(any_world)
    found = line_directions(*w.given, microbatch=7)
    gap = {k: sum_of(v[k] for v in found.values()) - x for k, x in w.direction.total.items()}
    assert norm(gap) <= PARTS * norm(w.direction.total)
    for name, v in expected.items():
        gap = {k: found[name][k] - x for k, x in v.items()}
        assert norm(gap) <= PARTS * norm(w.direction.total), name


def test_coefficients_sum_to_those_of_the_loss(any_world):
    w = any_world
    scores = w.stats.found.scores
    found = line_coefficients(w.objective, scores, w.batch)
    for k, whole_NS in enumerate(token_coefficients(w.objective, scores, w.batch)):
        torch.testing.assert_close(sum(c[k] for c in found.values()), whole_NS, rtol=0, atol=1e-15)
    if w.objective.ratio == "token":
        advantage_NS = w.batch.advantage_NS
        assert not found["positive"].logprob_NS[advantage_NS <= 0].any()
        assert not found["negative"].logprob_NS[advantage_NS >= 0].any()
    if "entropy_bonus" in found:
        assert not found["entropy_bonus"].logprob_NS.any()
        assert not found["kl"].entropy_NS.any()


@pytest.mark.parametrize("seed", range(3))
def test_lines_are_slopes_paired_with_the_whole(seed):
    """Value and influences: a line is first_order along it, their sum first_order of the step."""
    w = world("tabular", seed, "grpo")
    found = w.ledger()
    expected = plain_directions(w)
    for name, line in found.lines.items():
        along = Direction(parts={name: expected[name]}, lr=LR)
        same(line, LR * first_order(w.policy, w.evaluation, along, repackings=0, **FIXED))
    options = {"repackings": 0, **FIXED}
    whole = LR * first_order(w.policy, w.evaluation, w.direction, **options)
    bend = LR**2 / 2 * curvature(w.policy, w.evaluation, w.direction, **options)
    change = measured(w.policy, w.evaluation, w.direction, LR, **options)
    same(found.predicted, whole)
    same(found.unexplained, change - whole - bend)
    assert found.unexplained.stderr < 0.2 * found.measured.stderr


def same(got, expected):
    assert_exact(got.value, expected.value)
    (a,), (b,) = got.influences, expected.influences
    assert a.key == b.key
    torch.testing.assert_close(a.value_C, b.value_C, rtol=0, atol=1e-12)


def test_reward_lines_are_paired_and_the_slope_by_prompt_stands_beside(one):
    found = one.rewards()
    given = (one.policy, one.evaluation, one.reward_N, one.direction)
    same(found.predicted, LR * reward_slope(*given, repackings=0, **FIXED))
    same(found.predicted_by_prompt, LR * reward_slope_by_prompt(*given, repackings=0, **FIXED))


def test_absent_terms_have_no_line():
    w = world("transformer", 0, "bare")
    assert list(w.ledger().lines) == ["momentum", "decay", "positive", "negative"]
    assert list(line_directions(*w.given)) == ["momentum", "decay", "positive", "negative"]


def test_eventual(one):
    """The gradient's lines over 1 - b1, decay as it is, momentum nothing."""
    found = one.ledger()
    for name, line in found.lines.items():
        factor = {"momentum": 0.0, "decay": 1.0}.get(name, 10.0)
        assert_exact(found.eventual[name].value, factor * line.value)
        assert_exact(found.eventual[name].stderr, factor * line.stderr)


def test_coupled_decay_lives_on_in_the_momentum(one):
    """Adam adds its decay to the gradient; both ledgers."""
    for found in (one.ledger(coupled_decay=True), one.rewards(coupled_decay=True)):
        for name in ("decay", "positive"):
            assert found.lines[name].value != 0
            assert_exact(found.eventual[name].value, 10 * found.lines[name].value)
        assert found.eventual["momentum"].value == 0


def test_eventual_shares_are_what_adam_does_in_the_end():
    """P held by a huge eps: torch's own steps after one gradient, or one decay, summed."""
    gradient, theta, eps, lr = 0.3, 2.0, 1e4, 1e-3

    def moved(kind, steps, first, **options):
        """Displacement when the first step sees `first` and later steps no gradient."""
        p = torch.tensor([theta], dtype=torch.float64, requires_grad=True)
        optimizer = kind([p], lr=lr, betas=(B1, 0.99), eps=eps, **options)
        optimizer.state[p] = {
            "step": torch.tensor(1e6),  # bias corrections are 1
            "exp_avg": torch.zeros(1, dtype=torch.float64),
            "exp_avg_sq": torch.zeros(1, dtype=torch.float64),
        }
        for i in range(steps):
            p.grad = torch.tensor([first if i == 0 else 0.0], dtype=torch.float64)
            for group in optimizer.param_groups:
                group["weight_decay"] = options.get("weight_decay", 0.0) if i == 0 else 0.0
            optimizer.step()
        return (float(p.detach()) - theta) * eps

    adam, adamw = torch.optim.Adam, torch.optim.AdamW
    cases = [(adam, gradient, {}), (adam, 0.0, {"weight_decay": 0.1})]
    for kind, first, options in cases:
        once, in_the_end = (moved(kind, n, first, **options) for n in (1, 400))
        assert in_the_end / once == pytest.approx(10, rel=1e-3)
    once, in_the_end = (moved(adamw, n, 0.0, weight_decay=0.1) for n in (1, 400))
    assert in_the_end / once == pytest.approx(1)


def groups(*options):
    made = [
        AdamGroup(**{"names": (str(i),), "lr": LR, "eps": 1e-8, "weight_decay": 0.1, **given})
        for i, given in enumerate(options)
    ]
    return OptimizerState(groups=tuple(made), state={})


def test_what_eventual_needs_is_read_from_the_optimizer():
    plain, coupled = {"betas": (0.9, 0.99)}, {"betas": (0.9, 0.99), "decoupled": False}
    assert momentum_of(groups(plain, plain)) == (0.9, False)
    assert momentum_of(groups(coupled)) == (0.9, True)
    assert momentum_of(groups(coupled, {**plain, "weight_decay": 0.0})) == (0.9, True)
    assert momentum_of(groups({**coupled, "weight_decay": 0.0}, plain)) == (0.9, False)
    nobody = {"betas": (0.5, 0.9), "names": ()}
    assert momentum_of(groups(nobody, plain)) == (0.9, False)
    with pytest.raises(ValueError, match=r"groups have b1 \[0\.8, 0\.9\]; expected one for all"):
        momentum_of(groups(plain, {"betas": (0.8, 0.99)}))
    with pytest.raises(ValueError, match="coupled in some groups and decoupled in others"):
        momentum_of(groups(plain, coupled))
    sgd = OptimizerState(groups=(SGDGroup(names=("a",), lr=LR),), state={})
    for none in (sgd, groups(nobody)):
        with pytest.raises(ValueError, match=r"has 0 groups of Adam .*expected one or more"):
            momentum_of(none)


def test_what_is_at_hand_is_used(monkeypatch, one):
    """Lines, curvature and measurement found before give the same ledger without a pass."""
    before = one.ledger()
    bend = curvature(one.policy, one.evaluation, one.direction, repackings=0, **FIXED)
    base = one.policy.score(one.policy.params, one.evaluation)
    monkeypatch.setattr(one.policy, "score", None)
    again = one.ledger(lines=before.lines, curvature=bend, measured=before.measured, base=base)
    same(again.unexplained, before.unexplained)
    shuffled = dict(reversed(before.lines.items()))
    again = one.ledger(lines=shuffled, curvature=bend, measured=before.measured, base=base)
    assert tuple(again.lines) == LINES


def test_lines_from_an_influence_matrix(one):
    """Its extra columns are the lines, and its snis denominators hold D S: both ledgers."""
    directions = line_directions(*one.given)
    before, rewards = one.ledger(form="matched"), one.rewards()
    found = influence_matrix(
        one.policy,
        one.evaluation,
        *one.given,
        estimand=before.measured.estimand,
        microbatch=64,
        extra=directions,
    )
    lines = {name: found.columns([name])[name] for name in directions}
    same(one.ledger(form="matched", lines=lines).unexplained, before.unexplained)
    slopes = {
        name: found.dbottom_NC[:, found.columns_C.index(name)] / found.bottom_N
        for name in directions
    }
    again = one.rewards(score_slopes=slopes)
    same(again.unexplained, rewards.unexplained)
    same(again.predicted_by_prompt, rewards.predicted_by_prompt)
    with pytest.raises(ValueError, match=r"score_slopes has \['kl'\]; expected"):
        one.rewards(score_slopes={"kl": slopes["kl"]})
    with pytest.raises(ValueError, match=r"slope_N has shape \(3,\); expected"):
        one.rewards(score_slopes={name: x[:3] for name, x in slopes.items()})


def test_ready_directions(monkeypatch, one):
    """They spare the pass over U, and change nothing."""
    expected, found = one.ledger().predicted, line_directions(*one.given)
    monkeypatch.setattr(one.trained, "score", None)
    same(one.ledger(directions=found).predicted, expected)


def test_ratios_of_one():
    """Without stored log-probs the ratio is 1 and nothing is clipped."""
    w = world("tabular", 0, "bare")
    batch = replace(w.batch, old_logprob_NS=None)
    scores = w.stats.found.scores
    found = line_coefficients(w.objective, scores, batch)
    whole = token_coefficients(w.objective, scores, batch)
    torch.testing.assert_close(
        found["positive"].logprob_NS + found["negative"].logprob_NS, whole.logprob_NS
    )


# Teeth: each mistake is made on purpose, and the checks above must see it.


def test_a_forgotten_kl_line_is_caught(monkeypatch, one):
    true_lines = lines_module.line_objectives

    def forgetful(objective, batch):
        return {k: v for k, v in true_lines(objective, batch).items() if k != "kl"}

    for module in (lines_module, ledger_module):
        monkeypatch.setattr(module, "line_objectives", forgetful)
    with pytest.raises(ValueError, match="lines sum to another gradient"):
        check_lines(one)
    monkeypatch.setattr(lines_module, "_refuse_another_step", lambda *given: None)
    with pytest.raises(ValueError, match="the whole step's slope gives"):
        check_lines(one)
    monkeypatch.setattr(ledger_module, "_refuse_other_sum", lambda *given: None)
    with pytest.raises(AssertionError):
        check_lines(one)


def test_a_forgotten_or_subtracted_curvature_is_caught(monkeypatch, one):
    """By subtraction nothing would ever be unexplained; without it, too much."""
    check_lines(one)
    found = one.ledger()
    assert abs(found.unexplained.value) > 1e3 * EXACT, "subtraction would give 0"
    true_curvature = ledger_module.entropy_curvature

    def flat(*args, **options):
        bend = true_curvature(*args, **options)
        return replace(0.0 * bend, diagnostics=bend.diagnostics)

    monkeypatch.setattr(ledger_module, "entropy_curvature", flat)
    with pytest.raises(AssertionError, match="tolerance"):
        check_lines(one)


def test_clipping_that_is_ignored_is_caught(monkeypatch, one):
    true_lines = lines_module.line_objectives

    def unclipped(objective, batch):
        lines = true_lines(objective, batch)
        loss, part = lines["negative"]
        return {**lines, "negative": (replace(loss, clip_low=None, clip_high=None), part)}

    monkeypatch.setattr(lines_module, "line_objectives", unclipped)
    with pytest.raises(ValueError, match="lines sum to another gradient"):
        check_lines(one)


# What is refused, and what is said.


def test_another_batch_is_refused(one):
    other = world("transformer", 0, "grpo")
    batch = replace(other.batch, advantage_NS=-other.batch.advantage_NS)
    with pytest.raises(ValueError, match=r"lines sum to another gradient.*Pass the update"):
        line_directions(one.trained, batch, one.objective, one.direction)
    with pytest.raises(ValueError, match=r"at its training temperature"):
        line_directions(one.policy, one.batch, one.objective, one.direction)
    with pytest.raises(TypeError, match="Got Rollouts as update batch"):
        line_directions(one.trained, one.evaluation, one.objective, one.direction)


def test_an_observed_step_is_refused(one):
    seen = Direction(parts={"observed": one.direction.total}, lr=LR)
    with pytest.raises(ValueError, match=r"parts \['observed'\] and no preconditioner"):
        line_directions(one.trained, one.batch, one.objective, seen)


def test_lines_of_another_kind_are_refused(one):
    found = one.ledger()
    per_rate = {name: line / LR for name, line in found.lines.items()}
    with pytest.raises(ValueError, match="learning rate included"):
        one.ledger(lines=per_rate)
    few = {name: line for name, line in found.lines.items() if name != "kl"}
    with pytest.raises(ValueError, match=r"lines has \[.*\]; expected \['momentum'"):
        one.ledger(lines=few)
    with pytest.raises(ValueError, match=r"directions has \['momentum'\]; expected"):
        one.ledger(directions={"momentum": one.direction.momentum})
    with pytest.raises(ValueError, match=r"line 'momentum' is an estimate of Estimand"):
        one.rewards(lines=found.lines)


def test_options_out_of_range_are_refused(one):
    with pytest.raises(ValueError, match="momentum_decay is 1"):
        one.ledger(momentum_decay=1.0)
    with pytest.raises(ValueError, match="mode='reverse' gives no per-rollout terms"):
        one.ledger(mode="reverse")


def test_rewards_of_the_update_are_refused(one):
    rest = (one.evaluation, *one.given)
    count = len(one.evaluation)
    assert count >= 16
    others = one.evaluation.take(torch.arange(count).flip(0))
    copied_N = one.batch.reward_N.clone()  # values, not memory
    with pytest.raises(ValueError, match=r"values of reward_N are the update batch's rewards"):
        reward_ledger(one.policy, others, copied_N, *rest[1:], momentum_decay=B1)
    with pytest.raises(ValueError, match="have no rewards"):
        reward_ledger(one.policy, rest[0], None, *rest[1:], momentum_decay=B1)
    with pytest.raises(ValueError, match=r"expected .*one reward"):
        reward_ledger(one.policy, rest[0], one.reward_N[:3], *rest[1:], momentum_decay=B1)


def test_rewards_that_may_equal_the_update_s(one):
    """E that is U has U's rewards by right; a few rewards, or equal ones, coincide by chance."""
    found = reward_ledger(
        one.policy, one.evaluation, one.batch.reward_N, *one.given, momentum_decay=B1, **FIXED
    )
    assert any("rises by construction" in note for note in found.notes)
    flat_N = torch.ones(len(one.evaluation), dtype=torch.float64)
    flipped = one.evaluation.take(torch.arange(len(flat_N)).flip(0))
    flat = replace(one.batch, reward_N=flat_N)
    ledger_module._refuse_rewards_of(flat, flat_N.clone(), flipped)
    few = one.batch.take(torch.arange(15), slice(None))
    ledger_module._refuse_rewards_of(few, few.reward_N.clone(), flipped)
    unscored = replace(one.batch, reward_N=None)
    ledger_module._refuse_rewards_of(unscored, flat_N, flipped)


def test_notes_on_rewards(one):
    """E that is U is said; equal rewards give zeros and a reason; a lone rollout no slope by it."""
    found = one.rewards()
    assert any("rises by construction" in note for note in found.notes)
    rows = torch.tensor([0, 1, len(one.evaluation) - 1])
    lonely = replace(one.evaluation.take(rows), weight_N=None, share=1.0)
    flat_N = torch.ones(3)
    found = reward_ledger(one.policy, lonely, flat_N, *one.given, momentum_decay=B1, **FIXED)
    assert found.predicted_by_prompt is None
    assert any("1 prompts have one rollout" in note for note in found.notes)
    assert not any("rises by construction" in note for note in found.notes)
    for estimate in (*found.lines.values(), found.measured, found.unexplained):
        assert estimate.value == 0
        assert any("has the reward 1" in why for why in estimate.why_not)


def test_a_truncated_law_leaves_the_unexplained_unsaid():
    w = world("tabular", 0, "grpo")
    policy = TabularPolicy.random(0, temperature=0.7, top_p=0.99)
    inside = torch.isfinite(policy.score(policy.params, w.evaluation).logprob_NS.sum(1))
    rollouts = replace(w.evaluation.take(inside.nonzero()[:, 0]), weight_N=None, share=1.0)
    small = Direction(**{**vars(w.direction), "lr": 1e-6})
    given = (policy, rollouts, w.trained, w.batch, w.objective, small)
    found = entropy_ledger(*given, momentum_decay=B1, **FIXED)
    assert found.curvature is None
    assert found.unexplained is None
    assert "no curvature under top_p = 0.99" in found.notes[0]
    assert_close(found.measured.value, found.predicted.value, 1e-3)
    assert "none" in str(found)


def test_it_reads_as_a_table(one):
    rows = [row.split()[0] for row in str(one.ledger()).splitlines()]
    assert rows == [*LINES, "predicted", "curvature", "measured", "unexplained"]


def test_single_precision():
    """fp32: the lines sum to the step within rounding, and are not refused."""
    policy = TransformerPolicy(0, dtype=torch.float32)
    batch = stale_batch(policy, 0)
    live = {k: p.detach().clone().requires_grad_() for k, p in policy.params.items()}
    optimizer = torch.optim.AdamW(live.values(), lr=LR)
    objective = OBJECTIVES["grpo"]
    direction, *_ = compute_update_vector_adamw(
        policy, batch, objective, read_state(optimizer, live)
    )
    found = line_directions(policy, batch, objective, direction, microbatch=5)
    gap = {k: sum_of(v[k] for v in found.values()) - x for k, x in direction.total.items()}
    assert norm(gap) <= 1e-4 * sum(norm(v) for v in found.values())
    given = (policy, batch, objective, direction)
    found = entropy_ledger(policy, batch.rollouts, *given, momentum_decay=B1, **FIXED)
    assert abs(found.unexplained.value) < 0.2 * abs(found.measured.value)
