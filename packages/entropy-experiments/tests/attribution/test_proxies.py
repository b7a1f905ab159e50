"""Per-token proxies: each against a loop over tokens, and against what its formula is said to be.

A new proxy: its loop in `LOOPS`. Where its authors derive it from a softmax, autograd of that
softmax's entropy is the exact test.
"""

from __future__ import annotations

import inspect
from math import exp

import pytest
import torch

from entropy_experiments import Rollouts, Scores, UpdateBatch
from entropy_experiments.attribution import proxies
from entropy_experiments.attribution.token_rows import proxy_columns
from tolerances import EXACT

pytestmark = pytest.mark.exact


def ragged() -> tuple[UpdateBatch, Scores]:
    """Three rollouts with prompts, padding, a hole, a token without loss, and stale log-probs."""
    generator = torch.Generator().manual_seed(3)
    response_NS = torch.tensor(
        [[0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1]], dtype=torch.bool
    )
    loss_NS = response_NS.clone()
    loss_NS[1, 2] = False

    def draw() -> torch.Tensor:
        return torch.randn(3, 6, generator=generator, dtype=torch.float64)

    logprob_NS, entropy_NS, advantage_NS = -draw().abs(), draw().abs(), draw()
    old_NS = logprob_NS + 0.1 * draw()
    for x_NS in (logprob_NS, entropy_NS, advantage_NS, old_NS):
        x_NS[~response_NS] = torch.nan  # whoever reads it shows it
    batch = UpdateBatch(
        rollouts=Rollouts(
            tokens_NS=torch.zeros(3, 6, dtype=torch.int64),
            attention_NS=torch.ones(3, 6, dtype=torch.bool),
            response_NS=response_NS,
            prompt_N=torch.tensor([0, 0, 1]),
            weight_N=torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64),
        ),
        advantage_NS=advantage_NS,
        old_logprob_NS=old_NS,
        loss_NS=loss_NS,
    )
    return batch, Scores(logprob_NS, entropy_NS)


def tokens(batch: UpdateBatch, scores: Scores):
    """(row, column, weight, A, l, h, old l) of every token that the loss counts."""
    for i, s in batch.counted_NS.nonzero().tolist():
        old_NS = scores.logprob_NS if batch.old_logprob_NS is None else batch.old_logprob_NS
        values = (batch.advantage_NS, scores.logprob_NS, scores.entropy_NS, old_NS)
        yield i, s, float(batch.rollouts.weight_N[i]), *(float(x_NS[i, s]) for x_NS in values)


def covariance(batch, scores):
    rows = list(tokens(batch, scores))
    weight = sum(w for _, _, w, *_ in rows)
    mean_a = sum(w * a for _, _, w, a, *_ in rows) / weight
    mean_logp = sum(w * logp for _, _, w, _, logp, *_ in rows) / weight
    return {(i, s): (a - mean_a) * (logp - mean_logp) for i, s, _, a, logp, *_ in rows}


def omega(batch, scores):
    return {
        (i, s): a / exp(old) * exp(logp) * (1 - exp(logp)) * (logp + h)
        for i, s, _, a, logp, h, old in tokens(batch, scores)
    }


def s_star(batch, scores):
    rows = tokens(batch, scores)
    return {(i, s): exp(logp) * (logp + h) for i, s, _, _, logp, h, _ in rows}


LOOPS = {"covariance": covariance, "omega": omega, "s_star": s_star}


@pytest.mark.parametrize("stale", [True, False])
@pytest.mark.parametrize("proxy", proxies.PROXIES, ids=lambda proxy: proxy.__name__)
def test_a_proxy_is_its_loop_over_tokens(proxy, stale):
    batch, scores = ragged()
    if not stale:
        batch = UpdateBatch(
            rollouts=batch.rollouts, advantage_NS=batch.advantage_NS, loss_NS=batch.loss_NS
        )
    column_NS = proxy_columns(batch, scores)[f"proxy_{proxy.__name__}"]
    expected_NS = torch.zeros(3, 6, dtype=torch.float64)
    assert proxy.__name__ in LOOPS, "write its loop over tokens in LOOPS"
    for at, value in LOOPS[proxy.__name__](batch, scores).items():
        expected_NS[at] = value
    torch.testing.assert_close(column_NS, expected_NS, rtol=EXACT, atol=EXACT)


def test_every_function_is_listed_and_documented():
    """The name is the column, and the first line of the docstring its formula."""
    written = [
        function
        for name, function in inspect.getmembers(proxies, inspect.isfunction)
        if not name.startswith("_")
    ]
    assert {proxy.__name__ for proxy in proxies.PROXIES} == {f.__name__ for f in written}
    for proxy in written:
        assert (proxy.__doc__ or "").startswith("`"), proxy.__name__


def every_token(advantage_V: torch.Tensor) -> tuple[UpdateBatch, Scores, torch.Tensor]:
    """One softmax, every token a rollout weighted by its probability: averages are exact."""
    z_V = torch.tensor([0.3, -1.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    p_V = z_V.detach().softmax(0)
    response_NS = torch.tensor([[False, True]]).expand(4, 2)
    rollouts = Rollouts(
        tokens_NS=torch.stack([torch.zeros(4, dtype=torch.int64), torch.arange(4)], 1),
        attention_NS=torch.ones(4, 2, dtype=torch.bool),
        response_NS=response_NS,
        prompt_N=torch.arange(4),
        weight_N=p_V,
    )
    batch = UpdateBatch(
        rollouts=rollouts, advantage_NS=advantage_V[:, None].expand(4, 2).contiguous()
    )
    h = -(p_V * p_V.log()).sum()
    scores = Scores(p_V.log()[:, None].expand(4, 2), h.expand(4, 2))
    return batch, scores, z_V


def entropy_gradient(z_V: torch.Tensor) -> torch.Tensor:
    p_V = z_V.softmax(0)
    return torch.autograd.grad(-(p_V * p_V.log()).sum(), z_V)[0]


def test_the_mean_covariance_is_minus_the_slope_along_the_advantages():
    advantage_V = torch.tensor([1.0, -0.5, 0.25, 2.0], dtype=torch.float64)
    batch, scores, z_V = every_token(advantage_V)
    column_V = proxies.covariance(batch, scores)[:, 1]
    slope = float(entropy_gradient(z_V) @ advantage_V)
    mean = float(batch.rollouts.weight_N @ column_V)
    assert mean == pytest.approx(-slope, abs=EXACT)
    # Teeth: the uncentred product is another number.
    uncentred_V = batch.advantage_NS[:, 1] * scores.logprob_NS[:, 1]
    assert abs(float(batch.rollouts.weight_N @ uncentred_V) + slope) > 0.01 * abs(slope)


def test_s_star_is_minus_the_slope_along_the_tokens_logit():
    batch, scores, z_V = every_token(torch.ones(4, dtype=torch.float64))
    column_V = proxies.s_star(batch, scores)[:, 1]
    torch.testing.assert_close(column_V, -entropy_gradient(z_V), rtol=0, atol=EXACT)


def test_omega_is_the_push_on_the_tokens_own_logit_times_its_entropys_slope():
    """d (A p / p_old) / dz = (A p / p_old) (1 - p); -dH/dz = p (l + h): their product over p."""
    advantage_V = torch.tensor([1.0, -0.5, 0.25, 2.0], dtype=torch.float64)
    batch, scores, z_V = every_token(advantage_V)
    old_V = scores.logprob_NS[:, 1] - torch.tensor([0.2, -0.1, 0.0, 0.3], dtype=torch.float64)
    batch = UpdateBatch(
        rollouts=batch.rollouts,
        advantage_NS=batch.advantage_NS,
        old_logprob_NS=old_V[:, None].expand(4, 2),
    )
    column_V = proxies.omega(batch, scores)[:, 1]
    for k in range(4):
        surrogate = advantage_V[k] * (z_V.log_softmax(0)[k] - old_V[k]).exp()
        push = torch.autograd.grad(surrogate, z_V)[0][k]
        expected = -push * entropy_gradient(z_V)[k] / z_V.detach().softmax(0)[k]
        assert float(column_V[k]) == pytest.approx(float(expected), abs=EXACT)
