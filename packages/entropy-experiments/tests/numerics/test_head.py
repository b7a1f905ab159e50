"""The LM head in tiles of the vocabulary, against whole rows of logits written out."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from entropy_experiments.numerics import forward_mode, head
from entropy_experiments.numerics.derivatives import pullback, pushforward, pushforwards
from entropy_experiments.numerics.entropy import token_scores_from_hidden

pytestmark = pytest.mark.naive

T, D, V = 11, 4, 17
TOKENS = torch.tensor([0, 1, 2, 3, 4, 8, 11, 13, 15, 16, 16])


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def problem():
    params = {"hidden": 2 * draw(T, D), "head": draw(V, D, seed=1), "bias": draw(V, seed=2)}
    directions = [
        {name: draw(*value.shape, seed=3 + k) for name, value in params.items()} for k in range(3)
    ]
    return params, directions


def obvious(p, temperature=1.0):
    logp_TV = ((p["hidden"] @ p["head"].T + p["bias"]) / temperature).log_softmax(-1)
    p_TV = logp_TV.exp()
    return logp_TV.gather(1, TOKENS[:, None])[:, 0], -(p_TV * logp_TV).sum(-1)


def tiled(p, temperature=1.0):
    return token_scores_from_hidden(
        p["hidden"], p["head"], TOKENS, bias_V=p["bias"], temperature=temperature
    )


def scalar(f):
    return lambda p: sum(((k + 1) * x).pow(2).sum() for k, x in enumerate(f(p)))


@pytest.fixture(params=[1, 3, 5, 16, 17, 100])
def columns(request, monkeypatch):
    """Tiles of so many columns; the last is narrower."""
    monkeypatch.setattr(head, "NARROWEST", request.param)
    monkeypatch.setattr(head, "TILE_BYTES", {"cpu": 4 * T * request.param})
    return request.param


def close(found, wanted):
    return all(torch.allclose(a, b, rtol=1e-11, atol=1e-12) for a, b in zip(found, wanted))


def test_there_are_as_many_tiles_as_meant(columns):
    params, _ = problem()
    tiles = list(head._tiles(params["hidden"], params["head"], None))
    assert len(tiles) == -(-V // columns)
    assert sum(z_TB.shape[1] for _, z_TB in tiles) == V


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_values_and_slopes(columns, temperature):
    params, (v, *_) = problem()
    wanted = pushforward(lambda p: obvious(p, temperature), params, v)
    for how in ("jvp", "double_backward"):
        found = pushforward(lambda p: tiled(p, temperature), params, v, how=how)
        assert close(found[0], wanted[0])
        assert close(found[1], wanted[1])


def test_gradients(columns):
    params, _ = problem()
    _, wanted = pullback(scalar(obvious), params)
    _, found = pullback(scalar(tiled), params)
    assert close(found.values(), wanted.values())


@pytest.mark.parametrize("moving", ["hidden", "head", "bias"])
def test_one_thing_moves_and_the_others_do_not(columns, moving):
    params, (v, *_) = problem()
    one, along = {moving: params[moving]}, {moving: v[moving]}
    for how in ("jvp", "double_backward"):
        wanted = pushforward(lambda p: obvious(params | p), one, along, how=how)
        found = pushforward(lambda p: tiled(params | p), one, along, how=how)
        assert close(found[1], wanted[1])
    _, wanted = pullback(lambda p: scalar(obvious)(params | p), one)
    _, found = pullback(lambda p: scalar(tiled)(params | p), one)
    assert close(found.values(), wanted.values())


def test_many_directions_at_once(columns):
    params, directions = problem()
    here, slopes = pushforwards(tiled, params, directions)
    assert close(here, obvious(params))
    for slope, v in zip(slopes, directions, strict=True):
        assert close(slope, pushforward(obvious, params, v)[1])


def test_the_custom_rule_of_forward_mode(columns):
    """Taken where a graph is recorded around dual numbers: not by only_forward_mode."""
    params, (v, *_) = problem()
    wanted = pushforward(obvious, params, v)[1]
    with torch.enable_grad():
        leaf = v["hidden"].clone().requires_grad_()
        along = tuple((v | {"hidden": leaf}).values())
        _, found = torch.func.jvp(
            lambda *p: tiled(dict(zip(params, p, strict=True))), tuple(params.values()), along
        )
        assert close([x.detach() for x in found], wanted)
        # Linear in the direction: its gradient there is the gradient of the scores.
        (got,) = torch.autograd.grad(found[1].sum(), leaf)
    _, gradient = pullback(lambda p: obvious(params | p)[1].sum(), {"hidden": params["hidden"]})
    assert torch.allclose(got, gradient["hidden"], rtol=1e-11, atol=1e-12)


def test_second_derivatives_in_reverse(columns):
    """A gradient of a gradient goes through what the rule keeps, log sum exp and entropy, too."""
    params, _ = problem()

    def curved(f):
        leaf = params["hidden"].clone().requires_grad_()
        (first,) = torch.autograd.grad(
            scalar(f)(params | {"hidden": leaf}), leaf, create_graph=True
        )
        return torch.autograd.grad(first.pow(2).sum(), leaf)

    assert close(curved(tiled), curved(obvious))


def test_banned_tokens(columns):
    """A bias of -inf, in one tile or in all of one: no probability, and no NaN anywhere."""
    params, (v, *_) = problem()
    params["bias"][5:8] = -torch.inf
    one, along = {"hidden": params["hidden"]}, {"hidden": v["hidden"]}
    kept = [k for k in range(V) if not 5 <= k < 8]
    assert not set(TOKENS.tolist()) & {5, 6, 7}
    column_T = torch.tensor([kept.index(token) for token in TOKENS.tolist()])

    def allowed(p):
        logp_TV = (p["hidden"] @ params["head"][kept].T + params["bias"][kept]).log_softmax(-1)
        return logp_TV.gather(1, column_T[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(-1)

    def banned(p):
        return tiled(params | p)

    for how in ("jvp", "double_backward"):
        found = pushforward(banned, one, along, how=how)
        wanted = pushforward(allowed, one, along, how=how)
        assert close(found[0], wanted[0])
        assert close(found[1], wanted[1])
    _, gradient = pullback(scalar(banned), one)
    _, wanted = pullback(scalar(allowed), one)
    assert close(gradient.values(), wanted.values())


def test_a_banned_token_that_was_drawn(columns):
    params, _ = problem()
    params["bias"][0] = -torch.inf
    logprob_T, entropy_T = tiled(params)
    assert logprob_T[0] == -torch.inf
    assert torch.isfinite(logprob_T[1:]).all()
    assert torch.isfinite(entropy_T).all()


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_fp32_at_a_large_vocabulary(spread):
    """152k tokens in tiles of the real size: 1e-5 nats."""
    hidden_TD, head_VD = (spread * draw(8, 16)).float(), (draw(152_000, 16, seed=1) / 4).float()
    token_T = torch.arange(8) * 19_000
    assert len(list(head._tiles(hidden_TD, head_VD, None))) > 1
    logp_TV = (hidden_TD.double() @ head_VD.double().T).log_softmax(-1)
    wanted = logp_TV[torch.arange(8), token_T], -(logp_TV.exp() * logp_TV).sum(-1)
    for got, want in zip(token_scores_from_hidden(hidden_TD, head_VD, token_T), wanted):
        assert float((got - want).abs().max()) < 1e-5


@pytest.mark.parametrize("wrong", [V, V + 7, -100])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_token_that_the_head_does_not_have(wrong, top_p):
    params, _ = problem()
    token_T = TOKENS.clone()
    token_T[-1] = wrong
    with pytest.raises(ValueError, match=rf"the token {wrong}; expected 0 to {V - 1}"):
        token_scores_from_hidden(params["hidden"], params["head"], token_T, top_p=top_p)


def test_dual_numbers_of_dual_numbers_are_refused():
    """The layers below have rules of their own, which drop terms there."""
    params, (v, w, _) = problem()

    def slope(p):
        return torch.func.jvp(tiled, (p,), (v,))[1]

    with torch.no_grad(), pytest.raises(RuntimeError, match="Forward mode over forward mode"):
        torch.func.jvp(slope, (params,), (w,))


def test_a_gradient_taken_under_autocast_is_in_full_precision():
    hidden_TD, head_VD = (4 * draw(32, 16)).float(), draw(100, 16, seed=1).float()
    token_T = torch.arange(32)

    def gradient():
        leaf_TD = hidden_TD.clone().requires_grad_()
        scores = token_scores_from_hidden(leaf_TD, head_VD, token_T)
        return torch.autograd.grad(scores[1].sum() + scores[0].sum(), leaf_TD)[0]

    wanted = gradient()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gradient(), wanted)


def test_a_head_in_half_precision_is_multiplied_in_full(columns, monkeypatch):
    """And by the shorter rule: to cast it first would hide that it does not move."""
    monkeypatch.setattr(forward_mode, "WORTHWHILE", 0)
    params, (v, *_) = problem()
    half_VD, token_T = params["head"].bfloat16(), TOKENS
    at, along = {"hidden": params["hidden"].float()}, {"hidden": v["hidden"].float()}

    def scores(head_VD):
        return lambda p: token_scores_from_hidden(p["hidden"], head_VD, token_T)

    with FlopCounterMode(display=False) as counter:
        found = pushforward(scores(half_VD), at, along)
    assert counter.get_total_flops() == 2 * (2 * T * D * V)
    wanted = pushforward(scores(half_VD.float()), at, along)
    assert all(torch.equal(a, b) for one, two in zip(found, wanted) for a, b in zip(one, two))
    every = {"hidden": at["hidden"], "head": half_VD}
    grads = pullback(scalar(lambda p: token_scores_from_hidden(*p.values(), token_T)), every)[1]
    full = every | {"head": half_VD.float()}
    exact = pullback(scalar(lambda p: token_scores_from_hidden(*p.values(), token_T)), full)[1]
    assert torch.equal(grads["hidden"], exact["hidden"])
    assert grads["head"].dtype == torch.bfloat16
    assert torch.equal(grads["head"], exact["head"].bfloat16())


def test_chunks_of_a_trained_half_precision_head_are_added_in_full():
    """Rounded one by one and added in bf16, they would differ in most elements."""
    half_VD, hidden_TD = draw(V, D, seed=1).bfloat16(), draw(400, D).float()
    token_T = torch.arange(400) % V

    def gradient(head_VD, chunk):
        def cotangent(p):
            scores = token_scores_from_hidden(hidden_TD, p["head"], token_T, chunk=chunk)
            return sum(x_T.sum() for x_T in scores)

        return pullback(cotangent, {"head": head_VD})[1]["head"]

    wanted = gradient(half_VD.float(), 4)
    for found in (gradient(half_VD, chunk) for chunk in (400, 4)):
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, wanted.bfloat16())


def test_a_head_more_precise_than_the_states_is_refused():
    with pytest.raises(RuntimeError, match="dtype"):
        token_scores_from_hidden(draw(T, D).float(), draw(V, D, seed=1), TOKENS)


def test_a_frozen_head_is_not_multiplied_with_zeros(columns, monkeypatch):
    """One product more for the tangent, in every tile; a moving head needs two."""
    monkeypatch.setattr(forward_mode, "WORTHWHILE", 0)
    params, (v, *_) = problem()
    one, along = {"hidden": params["hidden"]}, {"hidden": v["hidden"]}

    def operations(f, at, direction):
        with FlopCounterMode(display=False) as counter:
            pushforward(f, at, direction)
        return counter.get_total_flops()

    plain = 2 * T * D * V
    assert operations(lambda p: tiled(params | p), one, along) == 2 * plain
    assert operations(tiled, params, v) == 3 * plain
