"""Fast code against the slow and obvious version of itself."""

import math

import pytest
import torch
from scipy import stats

from entropy_experiments.numerics.derivatives import pullback, pushforward
from entropy_experiments.numerics.entropy import (
    nucleus,
    nucleus_fingerprint,
    token_scores,
    token_scores_from_hidden,
)
from entropy_experiments.numerics.second_order import pushforward2, stencil_step
from entropy_experiments.numerics.sums import (
    bootstrap,
    by_prompt,
    earlier,
    jackknife,
    later,
    percentile_interval,
)
from entropy_experiments.numerics.weights import diagnose
from entropy_experiments.types import Estimand, Rollouts
from oracles.cases import case
from tolerances import FP32_ENTROPY, INVARIANT

pytestmark = pytest.mark.naive


def draw(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def plain(logits_TV, token_T, temperature=1.0):
    logp_TV = (logits_TV / temperature).log_softmax(-1)
    return logp_TV.gather(-1, token_T[:, None]).squeeze(-1), -(logp_TV.exp() * logp_TV).sum(-1)


def simple_rollouts(prompt_N, tokens=4, weight_N=None):
    n = len(prompt_N)
    response_NS = torch.ones(n, tokens + 1, dtype=torch.bool)
    response_NS[:, 0] = False
    return Rollouts(
        tokens_NS=torch.arange(n * (tokens + 1)).view(n, -1),
        attention_NS=torch.ones_like(response_NS),
        response_NS=response_NS,
        prompt_N=torch.as_tensor(prompt_N),
        weight_N=weight_N,
    )


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("chunk", [None, 1, 3, 100])
def test_token_scores(chunk, temperature):
    """Values, forward mode and reverse mode, through logits and through an LM head."""
    hidden_TD, head_VD, bias_V = draw(11, 4), draw(17, 4, seed=1), draw(17, seed=2)
    token_T = torch.arange(11) % 17
    params = {"hidden": hidden_TD, "head": head_VD, "bias": bias_V}
    v = {name: draw(*value.shape, seed=3) for name, value in params.items()}

    def logits(p):
        return p["hidden"] @ p["head"].T + p["bias"]

    def obvious(p):
        return plain(logits(p), token_T, temperature)

    def by_logits(p):
        return token_scores(logits(p), token_T, temperature=temperature, chunk=chunk)

    def by_hidden(p):
        return token_scores_from_hidden(
            p["hidden"],
            p["head"],
            token_T,
            bias_V=p["bias"],
            temperature=temperature,
            chunk=chunk,
        )

    def scalar(f):
        return lambda p: sum(((k + 1) * x).pow(2).sum() for k, x in enumerate(f(p)))

    expected = pushforward(obvious, params, v)
    _, expected_grads = pullback(scalar(obvious), params)
    for f in (by_logits, by_hidden):
        for how in ("jvp", "double_backward"):
            for got, want in zip(pushforward(f, params, v, how=how), expected):
                for a, b in zip(got, want):
                    assert torch.allclose(a, b, rtol=1e-11, atol=1e-12)
        _, grads = pullback(scalar(f), params)
        for name, want in expected_grads.items():
            assert torch.allclose(grads[name], want, rtol=1e-11, atol=1e-12)


def test_many_directions_by_vmap():
    logits_TV, token_T = draw(5, 7), torch.arange(5)
    v_KTV = draw(3, 5, 7, seed=1)

    def along(v_TV):
        return torch.func.jvp(lambda z: token_scores(z, token_T), (logits_TV,), (v_TV,))[1]

    together = torch.func.vmap(along)(v_KTV)
    for k in range(3):
        for got, want in zip(together, along(v_KTV[k])):
            assert torch.allclose(got[k], want, rtol=1e-12, atol=1e-14)


def test_second_derivative_against_nested_autograd():
    params, v = {"x": draw(4, 6)}, {"x": draw(4, 6, seed=1)}
    token_T = torch.arange(4)

    def f(p):
        return plain(torch.tanh(p["x"]) * 3, token_T)

    e = torch.zeros((), dtype=torch.float64)
    along = torch.ones_like(e)

    def path(e):
        return f({"x": params["x"] + e * v["x"]})

    first, second = torch.func.jvp(
        lambda e: torch.func.jvp(path, (e,), (along,))[1], (e,), (along,)
    )
    for how, tolerance in (("jvp", 1e-9), ("double_backward", 1e-9), ("central", 1e-6)):
        step = stencil_step(params, v, how, lr=None)
        _, got_first, got_second, *_ = pushforward2(f, params, v, how=how, step=step)
        for a, b in zip((*got_first, *got_second), (*first, *second)):
            assert float((a - b).abs().max()) < tolerance


def test_half_precision_logits_are_summed_in_fp32():
    logits_TV = (3 * draw(6, 5000)).bfloat16()
    token_T = torch.arange(6)
    l_T, h_T = token_scores(logits_TV, token_T)
    assert l_T.dtype == h_T.dtype == torch.float32
    for got, want in zip((l_T, h_T), plain(logits_TV.double(), token_T)):
        assert float((got - want).abs().max()) < FP32_ENTROPY


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_heads_are_multiplied_in_fp32(autocast):
    """bf16 states and head, fp32 states with a bf16 head: the error is that of fp32, not bf16."""
    hidden_TD, head_VD = draw(6, 32).bfloat16(), draw(500, 32, seed=1).bfloat16()
    token_T = torch.arange(6)
    truth = plain(hidden_TD.double() @ head_VD.double().T, token_T)
    with torch.autocast("cpu", enabled=autocast):
        for states_TD in (hidden_TD, hidden_TD.float()):
            leaf_TD = states_TD.clone().requires_grad_()
            found = token_scores_from_hidden(leaf_TD, head_VD, token_T)
            for got, want in zip(found, truth):
                assert float((got.detach() - want).abs().max()) < FP32_ENTROPY
            (g_TD,) = torch.autograd.grad(found[1].sum(), leaf_TD)
            assert g_TD.dtype == states_TD.dtype
    rounded = plain((hidden_TD @ head_VD.T).double(), token_T)
    assert float((rounded[1] - truth[1]).abs().max()) > 100 * FP32_ENTROPY, "bf16 logits do err"


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0, 12.0])
def test_fp32_entropy_at_a_large_vocabulary(spread):
    """152k tokens: 1e-5 nats, from logits that are flat, typical and sharp."""
    logits_TV = spread * draw(8, 152_000)
    token_T = torch.arange(8)
    found = token_scores(logits_TV.float(), token_T)
    for got, want in zip(found, plain(logits_TV.float().double(), token_T)):
        assert float((got - want).abs().max()) < FP32_ENTROPY


def test_banned_tokens_have_no_probability():
    logits_TV = draw(3, 6)
    logits_TV[:, 4] = -torch.inf
    token_T = torch.tensor([0, 1, 2])
    l_T, h_T = token_scores(logits_TV, token_T)
    kept = [0, 1, 2, 3, 5]
    want_l, want_h = plain(logits_TV[:, kept], token_T)
    assert torch.allclose(l_T, want_l)
    assert torch.allclose(h_T, want_h)
    _, grads = pullback(lambda p: token_scores(p["z"], token_T)[1].sum(), {"z": logits_TV})
    assert torch.isfinite(grads["z"]).all()
    assert float(token_scores(logits_TV, torch.tensor([4, 4, 4]))[0].max()) == -math.inf


@pytest.mark.parametrize("top_p", [0.2, 0.7, 0.95])
def test_top_p_law(top_p):
    """The likeliest tokens until their mass reaches top_p, renormalised; as a loop."""
    logits_TV, temperature = draw(20, 12), 0.8
    support_TV = nucleus(logits_TV / temperature, top_p)
    for t in range(20):
        p_V = (logits_TV[t] / temperature).softmax(-1)
        mass, kept = 0.0, set()
        for v in p_V.argsort(descending=True).tolist():
            if mass >= top_p:
                break
            kept.add(v)
            mass += float(p_V[v])
        assert kept == set(support_TV[t].nonzero().flatten().tolist())
    token_T = logits_TV.argmax(-1)
    cut_TV = logits_TV.masked_fill(~support_TV, -1e30)
    got = token_scores(logits_TV, token_T, temperature=temperature, top_p=top_p)
    for a, b in zip(got, plain(cut_TV, token_T, temperature)):
        assert torch.allclose(a, b)
    unlikely_T = logits_TV.argmin(-1)
    l_T, _ = token_scores(logits_TV, unlikely_T, temperature=temperature, top_p=top_p)
    assert float(l_T.max()) == -math.inf


def test_top_p_agrees_with_transformers():
    from transformers import TopPLogitsWarper

    logits_TV = draw(50, 30)
    for top_p in (0.3, 0.8, 0.95):
        theirs = TopPLogitsWarper(top_p)(None, logits_TV) > -math.inf
        assert torch.equal(nucleus(logits_TV, top_p), theirs)


def test_support_fingerprint_changes_with_the_support_only():
    logits_TV = draw(30, 12)
    here = nucleus_fingerprint(logits_TV, temperature=1.0, top_p=0.7)
    for scale in (1e-9, 0.5):
        moved_TV = logits_TV + scale * draw(30, 12, seed=1)
        there = nucleus_fingerprint(moved_TV, temperature=1.0, top_p=0.7)
        same = (nucleus(logits_TV, 0.7) == nucleus(moved_TV, 0.7)).all(-1)
        assert torch.equal(here == there, same)
    assert not same.all()


def test_later_and_earlier():
    x_NS = draw(3, 7)
    for s in range(7):
        assert torch.allclose(later(x_NS)[:, s], x_NS[:, s + 1 :].sum(1))
        assert torch.allclose(earlier(x_NS)[:, s], x_NS[:, :s].sum(1))
    assert later(x_NS[:, :1]).tolist() == earlier(x_NS[:, :1]).tolist() == [[0.0]] * 3


def ratio(a, b):
    return a / b


@pytest.mark.parametrize("prompts", ["population", "fixed"])
def test_jackknife_is_leave_one_out(prompts):
    """Influence, variance and bias against recomputing the ratio without each unit."""
    prompt_N = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5])
    rollouts = simple_rollouts(prompt_N)
    sums_NM = torch.stack([draw(13) + 3, draw(13, seed=1).abs() + 1], 1)
    estimand = Estimand(prompts=prompts)
    estimate = by_prompt(ratio, sums_NM, rollouts, estimand)

    def mean_without(keep_N):
        if prompts == "population":
            return sums_NM[keep_N].mean(0)
        # Each prompt keeps its weight, whoever of it is left.
        means = [
            (prompt_N == p).double().mean() * sums_NM[keep_N & (prompt_N == p)].mean(0)
            for p in prompt_N.unique()
        ]
        return torch.stack(means).sum(0)

    value = float(ratio(*sums_NM.mean(0)))
    if prompts == "population":
        units = [prompt_N == p for p in prompt_N.unique()]
        shares = [float(unit.double().mean()) for unit in units]
    else:
        units = [torch.arange(13) == i for i in range(13)]
        shares = [1 / int((prompt_N == p).sum()) for p in prompt_N]
    values = [
        (1 - share) * (value - float(ratio(*mean_without(~unit))))
        for unit, share in zip(units, shares)
    ]
    got = estimate.influences[0].value_C.tolist()
    assert got == pytest.approx(values, rel=1e-10, abs=1e-14)
    assert estimate.bias == pytest.approx(-sum(values), rel=1e-9)
    strata = [0] * len(units) if prompts == "population" else prompt_N.tolist()
    variance = 0.0
    for stratum in set(strata):
        mine = [v for v, s in zip(values, strata) if s == stratum]
        centre = sum(mine) / len(mine)
        variance += len(mine) / (len(mine) - 1) * sum((v - centre) ** 2 for v in mine)
    assert estimate.stderr == pytest.approx(math.sqrt(variance), rel=1e-10)
    half = stats.t.ppf(0.975, estimate.influences[0].variance()[1]) * estimate.stderr
    assert estimate.interval == pytest.approx((estimate.value - half, estimate.value + half))
    per_prompt = {}
    owners = prompt_N.unique() if prompts == "population" else prompt_N
    for prompt, v in zip(owners.tolist(), values):
        per_prompt[prompt] = per_prompt.get(prompt, 0.0) + v
    assert estimate.per_prompt == pytest.approx(per_prompt)


def test_jackknife_of_a_mean_is_the_textbook_standard_error():
    sums_NM = draw(40, 1)
    estimate = by_prompt(lambda m: m, sums_NM, simple_rollouts(torch.arange(40)), Estimand())
    assert estimate.stderr == pytest.approx(float(sums_NM.std() / math.sqrt(40)), rel=1e-12)
    assert estimate.bias == pytest.approx(0.0, abs=1e-14)


def test_bias_is_reported_and_not_subtracted():
    """x^2 of a mean is biased by var / n, and the jackknife knows."""
    noisy = draw(12, 1, scale=10.0)
    rollouts = simple_rollouts(torch.arange(12))
    estimate = by_prompt(lambda m: m**2, noisy - noisy.mean(), rollouts, Estimand())
    assert estimate.bias == pytest.approx(float(noisy.var() / 12), rel=1e-10)
    assert estimate.value == pytest.approx(0.0, abs=1e-12)


def test_degrees_of_freedom_fall_with_heavy_tails():
    """Normal units have nearly n - 1; one unit that is all the spread leaves two."""
    normal = by_prompt(lambda m: m, draw(2000, 1), simple_rollouts(torch.arange(2000)), Estimand())
    assert 0.9 * 1999 < normal.influences[0].variance()[1] <= 1999
    lonely = torch.zeros(40, 1, dtype=torch.float64)
    lonely[7] = 1.0
    rollouts = simple_rollouts(torch.arange(40))
    found = by_prompt(lambda m: m, lonely, rollouts, Estimand(), check_tail=True)
    freedom = found.influences[0].variance()[1]
    assert 2 < freedom < 2.2
    half = stats.t.ppf(0.975, freedom) * found.stderr
    assert found.interval == pytest.approx((found.value - half, found.value + half))
    assert not found.trusted
    assert "prompt 7 carries 9" in found.why_not[0]
    assert by_prompt(lambda m: m, lonely, rollouts, Estimand()).trusted


def test_degrees_of_freedom_of_a_fixed_set_are_satterthwaite():
    """One prompt ten times as noisy as seven others: its n - 1 is nearly all there is."""
    prompt_N = torch.arange(8).repeat_interleave(6)
    noise = draw(48, 1) * torch.where(prompt_N == 0, 10.0, 1.0)[:, None]
    estimand = Estimand(prompts="fixed")
    found = by_prompt(lambda m: m, noise, simple_rollouts(prompt_N), estimand)
    assert 4 < found.influences[0].variance()[1] < 12
    even = by_prompt(lambda m: m, draw(48, 1), simple_rollouts(prompt_N), estimand)
    assert 25 < even.influences[0].variance()[1] <= 40


@pytest.mark.parametrize("prompts", ["population", "fixed"])
def test_bootstrap_agrees_with_the_jackknife(prompts):
    prompt_N = torch.arange(40).repeat_interleave(3)
    rollouts = simple_rollouts(prompt_N)
    shared = draw(40)[prompt_N]
    sums_NM = torch.stack([draw(120) + shared + 3, draw(120, seed=1).abs() + 1], 1)
    estimand = Estimand(prompts=prompts)
    estimate = by_prompt(ratio, sums_NM, rollouts, estimand)
    values = bootstrap(
        ratio,
        sums_NM,
        rollouts,
        estimand,
        replicates=4000,
        generator=torch.Generator().manual_seed(0),
    )
    assert float(values.std()) == pytest.approx(estimate.stderr, rel=0.1)
    low, high = percentile_interval(values)
    assert low < estimate.value < high


def test_difference_of_two_estimates_is_paired():
    """The interval of a - b is that of the per-prompt differences."""
    rollouts = simple_rollouts(torch.arange(30))
    common = draw(30, 1, scale=5.0)
    a = by_prompt(lambda m: m, common + draw(30, 1, seed=1), rollouts, Estimand())
    b = by_prompt(lambda m: m, common + draw(30, 1, seed=2), rollouts, Estimand())
    difference = by_prompt(
        lambda m: m, draw(30, 1, seed=1) - draw(30, 1, seed=2), rollouts, Estimand()
    )
    assert (a - b).stderr == pytest.approx(difference.stderr, rel=1e-10)
    assert (a - b).interval == pytest.approx(difference.interval, rel=1e-9)
    assert (a - b).stderr < 0.5 * a.stderr
    assert (2.0 * a).stderr == pytest.approx(2 * a.stderr)
    assert (a - a).value == (a - a).stderr == 0.0


def test_estimates_of_disjoint_prompts_are_independent():
    a = by_prompt(lambda m: m, draw(30, 1), simple_rollouts(torch.arange(30)), Estimand())
    b = by_prompt(lambda m: m, draw(12, 1), simple_rollouts(torch.arange(12) + 100), Estimand())
    assert (a - b).stderr == pytest.approx(math.hypot(a.stderr, b.stderr))
    (va, fa), (vb, fb) = (e.influences[0].variance() for e in (a, b))
    welch = (va + vb) ** 2 / (va**2 / fa + vb**2 / fb)
    half = stats.t.ppf(0.975, welch) * (a - b).stderr
    assert (a - b).interval[1] - (a - b).value == pytest.approx(half)


@pytest.mark.parametrize("per_decision", [False, True])
def test_weight_diagnostics_by_loops(per_decision):
    oracle = case("tabular", 0, 1.0)
    rollouts = Rollouts(**{**vars(oracle.rollouts), "weight_N": None})
    logratio_NS = torch.where(rollouts.response_NS, 0.3 * draw(*rollouts.tokens_NS.shape), 0.0)
    found = diagnose(logratio_NS, rollouts, per_decision=per_decision)
    n = len(rollouts)
    ratios = [logratio_NS[i][rollouts.response_NS[i]].tolist() for i in range(n)]
    longest = max(map(len, ratios))
    if per_decision:  # the prefix weights of those who have a token at each position
        at = [[math.exp(sum(r[:k])) for r in ratios if len(r) > k] for k in range(longest)]
        at = [weights for weights in at if len(weights) >= 0.1 * n]
    else:
        at = [[math.exp(sum(r)) for r in ratios]]
    fractions = [sum(w) ** 2 / sum(x * x for x in w) / len(w) for w in at]
    assert found.ess == pytest.approx(n * min(fractions), rel=INVARIANT * 100)
    weights = at[fractions.index(min(fractions))]
    mean = sum(weights) / len(weights)
    assert found.w_max == pytest.approx(max(weights) / mean)
    assert found.w_min == pytest.approx(min(weights) / mean)
    totals = [math.exp(sum(r)) for r in ratios]
    kl = sum(w * math.log(w) - w + 1 for w in totals) / n
    assert found.kl == pytest.approx(kl)
    assert found.samples_needed == pytest.approx(math.exp(kl))
    assert found.k_hat is None, "62 rollouts are too few to ask"


def test_samples_needed():
    """One rollout that the new policy makes e^3 times likelier: three rollouts are too few."""
    logratio_NS = torch.zeros(3, 2, dtype=torch.float64)
    logratio_NS[0, 1] = 3.0
    found = diagnose(logratio_NS, simple_rollouts(torch.arange(3), tokens=1), per_decision=False)
    assert found.kl == pytest.approx((3 * math.e**3 - math.e**3 + 1) / 3)
    assert any("exp(KL)" in reason and "3 were given" in reason for reason in found.why_not)


def test_clip_fraction():
    rollouts = simple_rollouts(torch.arange(4), tokens=2)
    logratio_NS = torch.zeros(4, 3, dtype=torch.float64)
    logratio_NS[0, 1:] = 1.0
    logratio_NS[1, 1:] = -1.0
    whole = diagnose(logratio_NS, rollouts, per_decision=False, clip=1.5)
    assert whole.clip_fraction == 0.5
    assert "clipped" in " ".join(whole.why_not)
    by_token = diagnose(logratio_NS, rollouts, per_decision=True, clip=0.5)
    assert by_token.clip_fraction == 0.25
    assert diagnose(logratio_NS, rollouts, per_decision=False).clip_fraction == 0.0


def test_k_hat_is_asked_only_where_it_speaks():
    rollouts = simple_rollouts(torch.arange(400), tokens=1)

    def ask(scale):
        logratio_NS = torch.zeros(400, 2, dtype=torch.float64)
        logratio_NS[:, 1] = scale * draw(400)
        return diagnose(logratio_NS, rollouts, per_decision=False)

    assert ask(0.01).k_hat is None
    assert ask(1.0).k_hat is not None
    heavy = torch.zeros(400, 2, dtype=torch.float64)
    uniform = torch.rand(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    heavy[:, 1] = -1.2 * uniform.log()
    found = diagnose(heavy, rollouts, per_decision=False)
    assert found.k_hat > found.k_hat_limit
    assert "k-hat" in " ".join(found.why_not)


def test_jackknife_value_and_estimate_agree():
    rollouts = simple_rollouts(torch.arange(10))
    sums_NM = torch.stack([draw(10), draw(10, seed=1).abs() + 1], 1)
    value, _ = jackknife(ratio, sums_NM, rollouts, Estimand())
    assert value == by_prompt(ratio, sums_NM, rollouts, Estimand()).value
