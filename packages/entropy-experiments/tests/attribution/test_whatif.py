"""What-ifs against losses written out token by token, on policies small enough to enumerate.

The truth of an intervention: a plain loop over tokens builds the changed loss from plain scores,
plain autograd gives its gradient, the frozen P and c make a step of it, and the exact entropy is
differentiated along that. No code of `influence` takes part.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from entropy_experiments import Objective, UpdateBatch
from entropy_experiments.attribution.counterfactual import Recorded
from entropy_experiments.attribution.folds import prompt_folds
from entropy_experiments.attribution.interventions import applied
from entropy_experiments.attribution.token_rows import token_rows
from entropy_experiments.attribution.tokens import token_influence
from entropy_experiments.attribution.whatif import (
    Confirmation,
    Prediction,
    TokenTable,
    confirm,
    entropy_budget,
    facts,
    fold_columns,
    parse,
    repredict,
)
from entropy_experiments.estimate.gradient import entropy_coefficients
from entropy_experiments.estimate.options import slope_estimand
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.pipelines.influence.summary_json import budget_json, confirmation_json
from entropy_experiments.types import AdamGroup, Estimand, Estimate, OptimizerState, Rollouts
from entropy_experiments.types.estimate import Influence
from entropy_experiments.update.adamw import compute_update_vector_adamw
from oracles.cases import KINDS
from oracles.enumeration import all_rollouts, exact_change, exact_slope, exact_taylor, plain_scores
from tolerances import assert_close, assert_exact

pytestmark = pytest.mark.exact

ROWS = 12
LR = 0.02
MAX_NORM = 0.05
OBJECTIVE = Objective(loss="dapo", beta=0.05, kl="k3", entropy_coef=0.02, clip_high=0.3)


@cache
def world(kind: str = "transformer", objective: Objective = OBJECTIVE, stale: bool = True, **sizes):
    """A policy, every response to measure with, a batch with all that a loss may read, a step."""
    policy = KINDS[kind](3, temperature=0.8, **sizes)
    evaluation = all_rollouts(policy)
    generator = torch.Generator().manual_seed(7)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows_N = torch.randperm(len(evaluation), generator=generator)[:ROWS]
    part = evaluation.take(rows_N)
    rollouts = Rollouts(
        tokens_NS=part.tokens_NS,
        attention_NS=part.attention_NS,
        response_NS=part.response_NS,
        prompt_N=part.prompt_N,
    )
    shape = rollouts.tokens_NS.shape
    with torch.no_grad():
        l_NS, _ = plain_scores(policy, policy.params, rollouts)
    loss_NS = rollouts.response_NS.clone()
    loss_NS[4] = False  # a rollout the trainer masked
    batch = UpdateBatch(
        rollouts=rollouts,
        advantage_NS=noise(ROWS, 1).expand(shape).contiguous(),
        reward_N=(noise(ROWS) > 0).double(),
        old_logprob_NS=l_NS + 0.3 * noise(*shape) if stale else None,
        ref_logprob_NS=l_NS + 0.3 * noise(*shape),
        microbatch_N=torch.arange(ROWS) % 3,
        loss_NS=loss_NS,
    )
    direction, _, _ = compute_update_vector_adamw(
        policy, batch, objective, optimizer_of(policy), max_grad_norm=MAX_NORM
    )
    assert direction.clip_factor < 1
    estimand = slope_estimand(policy, form="to_go")
    found = token_influence(
        policy, evaluation, policy, batch, objective, direction, estimand=estimand
    )
    return policy, batch, direction, found


def optimizer_of(policy) -> OptimizerState:
    """AdamW after five steps."""
    generator = torch.Generator().manual_seed(11)
    group = AdamGroup(
        names=tuple(policy.params), lr=LR, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1
    )
    state = {}
    for name, p in policy.params.items():
        m, s = torch.randn(2, *p.shape, generator=generator, dtype=torch.float64)
        state[name] = {"step": 5.0, "exp_avg": 0.01 * m, "exp_avg_sq": 1e-4 * s**2 + 1e-6}
    return OptimizerState(groups=(group,), state=state)


def token_list(batch):
    """(row, column, k) of every counted token, in order."""
    out = []
    for row in range(len(batch.rollouts)):
        k = 0
        for column in range(batch.rollouts.tokens_NS.shape[1]):
            if batch.rollouts.response_NS[row, column]:
                if batch.counted_NS[row, column]:
                    out.append((row, column, k))
                k += 1
    return out


def slow_loss(policy, params, batch, objective, *, weight=None, mute=(), penalty=None):
    """A dapo loss with KL, entropy bonus, weights, muted advantages and |l - l_old|, by loops."""
    l_NS, h_NS = plain_scores(policy, params, batch.rollouts)
    weight, penalty, tokens = weight or {}, penalty or {}, token_list(batch)
    microbatches = sorted(set(batch.microbatch_N.tolist()))
    total = 0.0
    for row, column, _ in tokens:
        logp, h = l_NS[row, column], h_NS[row, column]
        a = float(batch.advantage_NS[row, column])
        if (row, column) in mute:
            a = 0.0
        old = logp.detach() if batch.old_logprob_NS is None else batch.old_logprob_NS[row, column]
        ratio = (logp - old).exp()
        low = -math.inf if objective.clip_low is None else 1 - objective.clip_low
        high = math.inf if objective.clip_high is None else 1 + objective.clip_high
        size = float(ratio.detach())
        bound = ratio if low <= size <= high else torch.tensor(min(max(size, low), high))
        loss = -torch.minimum(ratio * a, bound * a)
        gap = batch.ref_logprob_NS[row, column] - logp
        loss = loss + objective.beta * (gap.exp() - gap - 1)
        loss = loss + penalty.get((row, column), 0.0) * (logp - old).abs()
        mine = [t for t in tokens if batch.microbatch_N[t[0]] == batch.microbatch_N[row]]
        bonus = objective.entropy_coef * h / (len(microbatches) * len(mine))
        total = total + weight.get((row, column), 1.0) * (loss / len(tokens) - bonus)
    return total


def truth(made, objective=OBJECTIVE, *, lr=LR, **changes):
    """lr times the exact slope of H along the frozen step of the slow loss."""
    policy, batch, direction, _ = made
    leaves = {name: p.detach().clone().requires_grad_() for name, p in policy.params.items()}
    loss = slow_loss(policy, leaves, batch, objective, **changes)
    grads = dict(zip(leaves, torch.autograd.grad(loss, tuple(leaves.values())), strict=True))
    v = {
        name: direction.momentum[name]
        + direction.decay[name]
        - direction.preconditioner[name] * direction.clip_factor * grads[name]
        for name in leaves
    }
    return lr * exact_slope(policy, policy.params, v)


def chosen(made, test):
    """Places of counted tokens for which test(row, k, A, log-prob, h) holds."""
    policy, batch, _, _ = made
    with torch.no_grad():
        l_NS, h_NS = plain_scores(policy, policy.params, batch.rollouts)
    return {
        (row, column): (row, k)
        for row, column, k in token_list(batch)
        if test(row, k, *(float(x[row, column]) for x in (batch.advantage_NS, l_NS, h_NS)))
    }


def covariances(made):
    policy, batch, _, _ = made
    with torch.no_grad():
        l_NS, _ = plain_scores(policy, policy.params, batch.rollouts)
    tokens = token_list(batch)
    a = [float(batch.advantage_NS[row, column]) for row, column, _ in tokens]
    logp = [float(l_NS[row, column]) for row, column, _ in tokens]
    mean_a, mean_l = sum(a) / len(a), sum(logp) / len(logp)
    return {t[:2]: (x - mean_a) * (y - mean_l) for t, x, y in zip(tokens, a, logp, strict=True)}


def times(places, factor):
    return {"weight": dict.fromkeys(places, factor)}


SELECTED = {
    "drop_rollouts=2,7": (lambda row, k, a, logp, h: row in (2, 7), 0.0),
    "reweight_rollouts=2:0.5": (lambda row, k, a, logp, h: row == 2, 0.5),
    "drop_tokens=2.0,7.1": (lambda row, k, a, logp, h: (row, k) in ((2, 0), (7, 1)), 0.0),
    "reweight_tokens=3.1:2.5": (lambda row, k, a, logp, h: (row, k) == (3, 1), 2.5),
    "drop=negative": (lambda row, k, a, logp, h: a < 0, 0.0),
    "drop=p<0.4&A<0": (lambda row, k, a, logp, h: math.exp(logp) < 0.4 and a < 0, 0.0),
    "reweight=h>=0.5&k<2:0.25": (lambda row, k, a, logp, h: h >= 0.5 and k < 2, 0.25),
    "drop=rollout!=3 & logprob <= -1": (lambda row, k, a, logp, h: row != 3 and logp <= -1, 0.0),
}
OBJECTIVES = {
    "clip_high=0.05": {"clip_high": 0.05},
    "clip_low=0.02": {"clip_low": 0.02},
    "clip_high=none": {"clip_high": None},
    "beta=0.5": {"beta": 0.5},
    "entropy_coef=-0.1": {"entropy_coef": -0.1},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", SELECTED)
def test_selected_tokens(kind, text):
    made = world(kind)
    test, factor = SELECTED[text]
    places = chosen(made, test)
    prediction = repredict(made[3], text)
    assert prediction.tokens == len(places) > 0
    expected = truth(made, **times(places, factor))
    assert_exact(prediction.total, expected)
    assert abs(expected - truth(made)) > 1e-4 * abs(expected)  # it matters


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", OBJECTIVES)
def test_another_objective(kind, text):
    made = world(kind)
    expected = truth(made, replace(OBJECTIVE, **OBJECTIVES[text]))
    assert_exact(repredict(made[3], text).total, expected)
    assert abs(expected - truth(made)) > 1e-5 * abs(expected)


def test_kl_cov():
    made = world()
    found = made[3]
    cov = covariances(made)
    top = sorted(cov, key=cov.__getitem__, reverse=True)[: int(0.2 * len(cov))]
    free = replace(OBJECTIVE, clip_low=None, clip_high=None)
    expected = truth(made, free, penalty=dict.fromkeys(top, 1.5))
    assert_exact(repredict(found, "kl_cov=0.2:1.5").total, expected)
    assert abs(expected - truth(made, free)) > 1e-4 * abs(expected)
    assert abs(truth(made, free) - truth(made)) > 1e-4 * abs(expected)  # the clip is dropped, too


def in_range(made, low, high):
    """Where the covariance is between the bounds, and PPO's clip (0.8 to 1.3) has not been."""
    policy, batch, _, _ = made
    with torch.no_grad():
        l_NS, _ = plain_scores(policy, policy.params, batch.rollouts)
    taken, spared = [], []
    for (row, column), cov in covariances(made).items():
        a = float(batch.advantage_NS[row, column])
        ratio = math.exp(float(l_NS[row, column] - batch.old_logprob_NS[row, column]))
        clipped = (a > 0 and ratio > 1.3) or (a < 0 and ratio < 0.8)
        if low < cov < high:
            (spared if clipped else taken).append((row, column))
    assert taken
    assert spared
    return taken


def test_clip_cov_takes_all_in_range():
    """A ratio that reaches them all leaves nothing to chance; KL and bonus keep their share."""
    made = world()
    taken = in_range(made, 0.05, 2)
    expected = truth(made, mute=taken)
    assert_exact(repredict(made[3], "clip_cov=1:0.05:2").total, expected)
    assert abs(expected - truth(made, **times(taken, 0.0))) > 1e-5 * abs(expected)


def test_clip_cov_draws_from_its_range_by_seed():
    found = world()[3]
    recorded = Recorded(
        objective=found.objective, scores=found.scores, batch=found.batch, lr=found.lr
    )

    def taken(text):
        muted_NS = applied(parse(text), recorded).advantage_NS != found.batch.advantage_NS
        return {tuple(place) for place in muted_NS.nonzero().tolist()}

    whole = taken("clip_cov=1:0.05:2")
    assert whole == set(in_range(world(), 0.05, 2))
    count = int(0.1 * int(found.batch.counted_NS.sum()))
    draws = [taken(f"clip_cov=0.1:0.05:2:{seed}") for seed in range(8)]
    assert all(len(draw) == count and draw < whole for draw in draws)
    assert draws[0] == taken("clip_cov=0.1:0.05:2")
    assert len(set(map(frozenset, draws))) > 1
    assert len(taken("clip_cov=1e-9:0.05:2")) == 1  # at least one


def test_learning_rate_scales_the_whole_step():
    made = world()
    recorded = made[3].total
    prediction = repredict(made[3], "lr=0.05", curvature=-0.3)
    assert_exact(prediction.total, 0.05 / LR * recorded)
    assert_exact(prediction.recorded, recorded)
    assert_exact(prediction.curvature, -0.3 * (0.05 / LR) ** 2)
    assert_exact(prediction.baseline["momentum"], 0.05 / LR * made[3].baseline["momentum"])
    assert repredict(made[3], "drop=negative; lr=0.05", curvature=-0.3).curvature is None


def test_interventions_compose():
    made = world()
    text = "drop=negative; entropy_coef=0.2; reweight_rollouts=2:3; lr=0.05; clip_high=0.05"
    weight = dict.fromkeys(chosen(made, lambda row, k, a, logp, h: row == 2), 3.0)
    weight |= dict.fromkeys(chosen(made, lambda row, k, a, logp, h: a < 0), 0.0)
    objective = replace(OBJECTIVE, entropy_coef=0.2, clip_high=0.05)
    expected = truth(made, objective, lr=0.05, weight=weight)
    assert_exact(repredict(made[3], text).total, expected)
    assert_exact(repredict(made[3], text.split("; ")).total, expected)
    assert_exact(repredict(made[3], [*parse(text)]).total, expected)


def test_nothing_changed_is_the_recorded_step():
    made = world()
    prediction = repredict(made[3], ())
    assert_exact(prediction.total, truth(made))
    assert prediction.change == 0
    assert prediction.name == "as recorded"
    assert prediction.notes == ("no token's coefficient changes",)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("clip_high=0.28", "every ratio is 1: a clip range changes nothing"),
        ("clip_low=none", "every ratio is 1: a clip range changes nothing"),
        ("kl_cov=0.5", "KL-Cov changes nothing in the first step of a batch"),
        ("drop=p>2", "selects no token"),
        ("drop_tokens=4.0", "token 4.0 selects no token that the loss counts"),
        ("clip_cov=1:50:60", "no token has a covariance between 50 and 60"),
    ],
)
def test_what_changes_nothing_says_so(text, note):
    found = world(stale=False)[3]
    prediction = repredict(found, text)
    assert prediction.change == 0
    assert prediction.tokens == 0
    assert any(note in said for said in prediction.notes)


def test_rounding_of_a_recorded_ratio_has_no_sign():
    """Old log-probs recorded while sampling differ by rounding: KL-Cov sees no sign there."""
    found = world(stale=False)[3]
    generator = torch.Generator().manual_seed(0)
    noise_NS = torch.randn(found.scores.logprob_NS.shape, generator=generator, dtype=torch.float64)
    old_NS = found.scores.logprob_NS + 1e-7 * noise_NS
    nearly = replace(found, batch=replace(found.batch, old_logprob_NS=old_NS))
    assert_close(repredict(nearly, "kl_cov=0.5").total, found.total, 1e-6)


def test_standard_error_of_the_change_is_that_of_its_folds():
    found = world()[3]
    prediction = repredict(found, "drop=negative")
    keep_NS = found.batch.advantage_NS >= 0
    new_K, old_K = (found.fold_KNS * keep_NS).sum((1, 2)), found.fold_KNS.sum((1, 2))
    baseline_K = plain_folds(world(), "momentum", "decay")
    assert_exact(prediction.stderr, spread_of(new_K + baseline_K, found))
    assert_exact(prediction.change_stderr, spread_of(new_K - old_K, found))
    # Without the baseline it is another number.
    assert abs(spread_of(new_K, found) / prediction.stderr - 1) > 1e-3


def spread_of(fold_K, found):
    share_K = found.share_K
    return float((((fold_K - share_K * fold_K.sum()) ** 2 / share_K).sum() / (2 - 1)).sqrt())


def plain_folds(made, *parts):
    """[K]: lr g_H^(k) . parts, g_H^(k) by plain autograd of the fold's share of H."""
    policy, _, direction, found = made
    evaluation = all_rollouts(policy)
    base = score_all(policy, policy.params, evaluation, microbatch=256)
    cotangent = entropy_coefficients(base, evaluation, found.estimand)
    fold_N = prompt_folds(evaluation, found.folds)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in policy.params.items()}
    scores = plain_scores(policy, leaves, evaluation)
    out = []
    for k in range(found.folds):
        inside_NS = evaluation.response_NS & (fold_N == k)[:, None]
        value = sum(
            (w_NS[inside_NS] * x_NS[inside_NS]).sum()
            for w_NS, x_NS in zip(cotangent, scores, strict=True)
        )
        grads = torch.autograd.grad(value, tuple(leaves.values()), retain_graph=True)
        g = dict(zip(leaves, grads, strict=True))
        out.append(LR * sum(float((g[n] * direction.parts[p][n]).sum()) for n in g for p in parts))
    return torch.tensor(out, dtype=torch.float64)


def test_standard_error_of_another_learning_rate_is_of_the_whole_step():
    """Momentum and decay grow with the learning rate, and so does their error."""
    made = world()
    found = made[3]
    whole_K = plain_folds(made, "momentum", "decay", "gradient")
    assert_exact(float(whole_K.sum()), found.total)
    prediction = repredict(found, "lr=0.05")
    assert_exact(prediction.stderr, 0.05 / LR * spread_of(whole_K, found))
    assert_exact(prediction.change_stderr, (0.05 / LR - 1) * spread_of(whole_K, found))
    gradient_K = plain_folds(made, "gradient")
    assert_exact(float(gradient_K.sum()), found.gradient)
    alone = (0.05 / LR - 1) * spread_of(gradient_K, found)
    assert abs(alone / prediction.change_stderr - 1) > 1e-3
    # A table saved before baselines were kept by fold cannot tell.
    kept = facts(found)
    rows = {**token_rows(found), **fold_columns(found)}
    del kept["baseline_K"]
    old = TokenTable.from_rows(rows, kept)
    assert repredict(old, "lr=0.05").change_stderr is None
    assert repredict(old, "drop=negative").stderr is None
    assert_exact(
        repredict(old, "drop=negative").change_stderr,
        repredict(found, "drop=negative").change_stderr,
    )


def test_a_prediction_says_its_error_and_what_is_frozen():
    found = world()[3]
    prediction = repredict(found, "drop=negative")
    told = str(prediction)
    assert f"a difference of {prediction.change:+.3g} +- {prediction.change_stderr:.0e}" in told
    assert "advantages, normalisers, P and clip factor as they were" in told
    assert "+-" not in str(replace(prediction, change_stderr=None))


def test_sequence_ratio():
    """One ratio per rollout: a dropped token's loss still moves through its neighbours'."""
    objective = replace(OBJECTIVE, ratio="sequence", beta=0.0, entropy_coef=0.0, clip_high=5.0)
    objective = replace(objective, clip_low=None)
    policy, batch, direction, found = world("transformer", objective)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in policy.params.items()}
    l_NS, _ = plain_scores(policy, leaves, batch.rollouts)
    total, count = 0.0, len(token_list(batch))
    for row in {t[0] for t in token_list(batch)}:
        mine = [t for t in token_list(batch) if t[0] == row]
        gaps = [l_NS[row, c] - batch.old_logprob_NS[row, c] for _, c, _ in mine]
        ratio = (sum(gaps) / len(gaps)).exp()
        for _, column, k in mine:
            if (row, k) != (2, 0):
                total = total - ratio * float(batch.advantage_NS[row, column]) / count
    grads = dict(zip(leaves, torch.autograd.grad(total, tuple(leaves.values())), strict=True))
    g = {
        name: direction.preconditioner[name] * direction.clip_factor * grads[name] for name in grads
    }
    v = {name: direction.momentum[name] + direction.decay[name] - g[name] for name in g}
    expected = LR * exact_slope(policy, policy.params, v)
    assert_exact(repredict(found, "drop_tokens=2.0").total, expected)


def confirmed(made, text):
    policy, _, direction, found = made
    return confirm(
        policy,
        all_rollouts(policy),
        policy,
        found,
        direction,
        optimizer_of(policy),
        text,
        max_grad_norm=MAX_NORM,
        microbatch=256,
        repackings=0,
    )


@pytest.mark.parametrize("text", ["drop=negative", "entropy_coef=0.3; lr=0.01"])
def test_a_confirmation_is_made_of_exact_numbers(text):
    """The real step by hand: slow loss, torch's own AdamW and clipping, exact entropies."""
    made = world()
    policy, batch, _, _ = made
    lr = 0.01 if "lr" in text else LR
    negative = chosen(made, lambda row, k, a, logp, h: a < 0)
    changes = times(negative, 0.0) if "negative" in text else {}
    objective = OBJECTIVE if changes else replace(OBJECTIVE, entropy_coef=0.3)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in policy.params.items()}
    slow_loss(policy, leaves, batch, objective, **changes).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(list(leaves.values()), MAX_NORM))
    adam = torch.optim.AdamW(leaves.values(), lr=lr, betas=(0.9, 0.99), weight_decay=0.1)
    for name, entry in optimizer_of(policy).state.items():
        adam.state[leaves[name]] = {**entry, "step": torch.tensor(entry["step"])}
    adam.step()
    v = {name: (leaf.detach() - policy.params[name]) / lr for name, leaf in leaves.items()}

    got = confirmed(made, text)
    _, slope, bend = exact_taylor(policy, policy.params, v)
    assert_close(got.frozen.value, truth(made, objective, lr=lr, **changes), 1e-9)
    assert_close(got.recomputed.value, lr * slope, 1e-9)
    assert_close(got.curvature.value, lr**2 / 2 * bend, 1e-9)
    assert_close(got.measured.value, exact_change(policy, policy.params, v, lr), 1e-9)
    assert_close(got.prediction.total, got.frozen.value, 1e-9)
    assert got.clip_factors[0] != got.clip_factors[1] == pytest.approx(MAX_NORM / norm, rel=1e-4)
    parts = got.frozen.value + sum(part.value for part in got.explained.values())
    assert_exact(parts + got.rest.value, got.measured.value)
    assert_exact(got.change.value, got.measured.value - got.measured_recorded.value)
    assert got.agrees is None  # two prompts have no interval
    assert got.effect_agrees is None
    assert "not confirmed, for want of an interval" in got.verdict


def test_a_step_that_the_clip_undoes_is_explained():
    """A loss 20 times as large: frozen, the step is too; really, the clip factor takes it back."""
    made = world(prompts=8)
    got = confirmed(made, "reweight=p<=1:20; lr=0.002")
    assert got.clip_factors[0] == pytest.approx(20 * got.clip_factors[1], rel=1e-3)
    assert got.agrees is False
    assert got.accounted is True
    # The clip takes it all back: the effect is nothing like the frozen prediction of it.
    assert got.effect_agrees is False
    assert abs(got.rest.value) < 1e-3 * abs(got.difference.value)
    assert "outside the measured interval, and explained: measured - predicted" in got.verdict
    assert "of that denominator and clip +0.02" in got.verdict
    assert ", curvature +" in got.verdict
    # Take the explanation away, and the words change.
    wrong = replace(got, recomputed=got.frozen)
    assert wrong.accounted is False
    assert "NOT explained" in wrong.verdict
    assert "smaller learning rate" in str(wrong)
    plain = confirmed(made, "reweight_rollouts=0:1.01; lr=0.002")
    assert plain.agrees is True
    assert plain.verdict.startswith("confirmed: the frozen prediction is inside the measured")


SAMPLE_C = torch.tensor([1.0, -2.0, 0.5, 1.5, -1.0, 2.0, -1.5, -0.5], dtype=torch.float64)
OTHER_C = torch.tensor([1.0, 1.0, -2.0, 0.5, -0.5, 1.5, -1.0, -0.5], dtype=torch.float64)


def seen(value, common=0.0, own=0.0):
    """An estimate from eight prompts: an error that all have, and one of its own."""
    noise_C = (common * SAMPLE_C + own * OTHER_C) / 8
    prompt_C = torch.arange(8)
    influence = Influence(
        value_C=noise_C, prompt_C=prompt_C, stratum_C=torch.zeros(8).long(), sample="e"
    )
    return Estimate.build(value=value, estimand=Estimand(), influences=[influence])


def answer(
    *, predicted, recorded=0.0, gap=0.0, bend=None, rest=0.0, common=0.02, own=0.0, was=None
) -> Confirmation:
    """measured = predicted + gap + bend + rest; all share the sample's error."""
    nothing = torch.zeros(1, 1)
    prediction = Prediction(
        name="x",
        gradient=predicted,
        baseline={},
        recorded=recorded,
        stderr=None,
        change_stderr=None,
        lr=LR,
        curvature=None,
        tokens=1,
        notes=(),
        value_NS=nothing,
    )
    return Confirmation(
        prediction=prediction,
        frozen=seen(predicted, common),
        recomputed=seen(predicted + gap, common),
        curvature=None if bend is None else seen(bend),
        measured=seen(predicted + gap + (bend or 0.0) + rest, common, own),
        measured_recorded=seen(recorded, common) if was is None else was,
        clip_factors=(1.0, 1.0),
    )


def test_a_step_that_bends_is_not_confirmed_by_a_wide_interval():
    """lr = 0.012 of the shipped run, 48 prompts: two large terms cancel by chance."""
    got = answer(predicted=-0.0137, bend=-0.011, rest=0.010, own=0.02)
    assert got.agrees is True
    assert got.beyond_linear
    assert got.confirmed is False
    assert not got.verdict.startswith("confirmed")
    assert "inside the measured interval" in got.verdict
    assert "beyond the linear range" in got.verdict
    # Curvature alone is enough, and so is the rest; half of the slope's share is the limit.
    assert answer(predicted=-0.01, bend=-0.0051).beyond_linear
    assert answer(predicted=-0.01, bend=0.0, rest=0.0051, own=0.02).beyond_linear
    fine = answer(predicted=-0.01, bend=-0.0049)
    assert not fine.beyond_linear
    assert fine.confirmed is True
    # The slope is that of the step as made, not the frozen one.
    assert answer(predicted=-0.01, gap=0.009, bend=-0.001).beyond_linear


def test_the_rest_is_judged_by_its_own_paired_interval():
    """The sample's error is in every term; what is left without it decides."""
    got = answer(predicted=-0.01, bend=-0.001, rest=0.002)
    assert got.agrees is True
    assert got.accounted is False
    assert got.confirmed is False
    assert "inside the measured interval, but NOT explained" in got.verdict
    assert "smaller learning rate" in got.verdict
    assert answer(predicted=-0.01, bend=-0.001, rest=0.002, own=0.01).accounted is True
    # The error of the curvature is no excuse: it is in the difference, not in the rest.
    bent = answer(predicted=-0.01, bend=-0.001, rest=0.002)
    wide = replace(bent, curvature=seen(-0.001, own=0.05), measured=seen(-0.009, 0.02, 0.05))
    assert wide.difference.covers(sum(part.value for part in wide.explained.values()))
    assert wide.accounted is False
    # A rest of 0.007 % is nothing, however sharp its interval.
    tiny = answer(predicted=-0.01, bend=-0.001, rest=0.0000008)
    assert not tiny.rest.covers(0.0)
    assert tiny.accounted is True
    assert tiny.confirmed is True


@pytest.mark.parametrize(
    ("predicted", "measured", "half", "effect", "agrees"),
    [
        (0.004, 0.0041, 0.001, "as predicted", True),
        (0.004, 0.001, 0.001, "not as predicted", False),
        (0.004, -0.003, 0.004, "not as predicted", False),
        (0.001, 0.0005, 0.004, "too noisy to tell", None),
        (-0.001, 0.0005, 0.004, "too noisy to tell", None),
        (0.0, 0.00001, 0.0001, "as predicted", True),  # nothing predicted, nothing seen
        (0.0, 0.001, 0.004, "too noisy to tell", None),
    ],
)
def test_the_effect_has_three_answers(predicted, measured, half, effect, agrees):
    unit = seen(0.0, own=1.0)
    own = half / unit.interval[1]
    recorded = -0.02
    got = answer(predicted=recorded + predicted, recorded=recorded, rest=measured - predicted)
    was = seen(recorded, common=0.02, own=own)
    got = replace(got, measured_recorded=was)
    assert_close(got.change.value, measured, 1e-9)
    assert_close((got.change.interval[1] - got.change.interval[0]) / 2, half, 1e-9)
    assert got.effect == effect
    assert got.effect_agrees is agrees
    assert effect in str(got)


def test_another_effect_than_predicted_says_what_is_behind_it():
    adam = answer(predicted=-0.01, recorded=-0.02, gap=-0.008, bend=-0.0001)
    assert adam.effect_in_words == "not as predicted (Adam divides by the new gradient's size)"
    bent = answer(predicted=-0.04, recorded=-0.02, bend=-0.008)  # an lr: what-if has no gap
    assert bent.effect_in_words == "not as predicted (the steps bend)"
    assert answer(predicted=-0.01, recorded=-0.02).effect_in_words == "as predicted"
    assert confirmation_json(adam)["effect"] == adam.effect_in_words
    assert confirmation_json(adam)["beyond_linear"] is False


def test_entropy_budget_is_spent():
    policy, _, direction, _ = world()
    _, slope, bend = exact_taylor(policy, policy.params, direction.total)
    for size in (1e-6, 1e-3):
        budget = math.copysign(size, slope)
        found = entropy_budget(slope, bend, budget)
        assert_exact(found.linear * slope, budget)
        x = found.learning_rate
        assert x > 0
        assert_exact(slope * x + bend / 2 * x**2, budget)
    rate = entropy_budget(slope, bend, math.copysign(1e-4, slope)).learning_rate
    spent = exact_change(policy, policy.params, direction.total, rate)
    assert abs(abs(spent) - 1e-4) < 1e-6


@pytest.mark.parametrize("slope", [2.0, -2.0])
@pytest.mark.parametrize("bend", [3.0, -3.0, 0.0])
def test_smallest_positive_root(slope, bend):
    budget = math.copysign(0.1, slope)
    found = entropy_budget(slope, bend, budget)
    xs = torch.linspace(0, 10, 2_000_001, dtype=torch.float64)
    change = slope * xs + bend / 2 * xs**2 - budget
    first = float(xs[(change[1:].sign() != change[:-1].sign()).nonzero()[0]])
    assert abs(found.learning_rate - first) < 1e-5


def test_a_budget_beyond_the_turn():
    found = entropy_budget(-2.0, 4.0, -0.6)  # turns at 0.5, after -0.5 nats
    assert found.curved is None
    assert found.linear == 0.3
    assert "turns at learning rate 0.5, after -0.5 nats" in found.notes[0]
    assert "outside the linear range (up to learning rate 0.1" in found.notes[1]
    with pytest.raises(ValueError, match=r"No learning rate spends -0\.6 nats: with curvature"):
        _ = found.learning_rate
    assert entropy_budget(-2.0, 4.0, -0.5).learning_rate == 0.5
    assert entropy_budget(-2.0, 4.0, -0.1).notes == ()
    assert "outside" in entropy_budget(-2.0, 4.0, -0.3).notes[0]
    assert "none with curvature" in str(found)


def test_a_budget_without_curvature_is_linear_and_says_so():
    """top_p < 1 has none: no number may pretend to have it."""
    found = entropy_budget(-2.0, None, -0.1)
    assert found.linear == 0.05
    assert found.curved is None
    assert found.linear_range is None
    assert "no curvature is known" in found.notes[0]
    assert "with curvature" not in str(found)
    with pytest.raises(ValueError, match="no curvature is known"):
        _ = found.learning_rate
    ledger = {"predicted": {"value": -0.02}, "curvature": None}
    said = budget_json(ledger, 0.01, -0.1)
    assert said["linear"] == 0.05
    assert said["curved"] is None
    assert said["curvature_known"] is False
    assert "no curvature is known" in said["notes"][0]
    bent = budget_json({**ledger, "curvature": {"value": 0.0002}}, 0.01, -0.1)
    assert bent["curved"] == entropy_budget(-2.0, 4.0, -0.1).curved
