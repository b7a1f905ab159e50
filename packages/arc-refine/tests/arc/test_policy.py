"""The squashed Gaussian's density against torch.distributions, its score, its entropy."""

import math

import pytest
import torch
from torch.distributions import AffineTransform, Independent, TanhTransform, TransformedDistribution

from arc_refine.policy import LOG_SIGMA, RefinePolicy


@pytest.fixture
def case():
    torch.manual_seed(0)
    policy = RefinePolicy(5, 3, bound=0.7).double()
    with torch.no_grad():  # away from the quiet start: other means and spreads in each coordinate
        for p in policy.parameters():
            p.add_(0.4 * torch.randn_like(p))
    s_BS = policy.state(torch.randn(4, 5).double(), torch.randn(4, 3).double())
    return policy, s_BS


def _reference(policy, s_BS):
    squashed = TransformedDistribution(
        policy.distribution(s_BS), [TanhTransform(), AffineTransform(0.0, policy.bound)]
    )
    return Independent(squashed, 1)


def test_density_is_torch_s(case):
    policy, s_BS = case
    u_KBE, a_KBE = policy.sample(s_BS, 6, torch.Generator().manual_seed(1))
    expected = _reference(policy, s_BS).log_prob(a_KBE)
    torch.testing.assert_close(policy.log_prob(s_BS, u_KBE), expected, rtol=0, atol=1e-9)


def test_density_has_teeth(case):
    """Without the slope of tanh, or without the bound in it, the test above would fail."""
    policy, s_BS = case
    u_KBE, _ = policy.sample(s_BS, 6, torch.Generator().manual_seed(1))
    full = policy.log_prob(s_BS, u_KBE)
    gaussian = policy.distribution(s_BS).log_prob(u_KBE).sum(-1)
    no_bound = full + 5 * math.log(policy.bound)
    assert (full - gaussian).abs().min() > 1e-3
    assert (full - no_bound).abs().min() > 1


def test_density_integrates_to_one():
    torch.manual_seed(1)
    policy = RefinePolicy(1, 2, bound=0.3).double()
    s_BS = policy.state(torch.randn(1, 1).double(), torch.randn(1, 2).double())
    u = torch.linspace(-12, 12, 40001, dtype=torch.float64)
    density = policy.log_prob(s_BS, u[:, None, None])[:, 0].exp()
    area = torch.trapezoid(density, policy.squash(u))
    assert area.item() == pytest.approx(1, abs=1e-5)


def test_far_out_it_stays_finite(case):
    policy, s_BS = case
    u = torch.full((4, 5), 60.0, dtype=torch.float64, requires_grad=True)
    value = policy.log_prob(s_BS, u)
    (slope,) = torch.autograd.grad(value.sum(), u)
    assert torch.isfinite(value).all()
    assert torch.isfinite(slope).all()
    # From a it could not be computed: tanh(60) is 1 to the last digit.
    assert not torch.isfinite(_reference(policy, s_BS).log_prob(policy.squash(u))).all()


def test_mean_score_is_zero(case):
    """E[grad log pi] = 0 under its own samples: z-tests on every coordinate of both heads' bias."""
    policy, s_BS = case
    K = 4000
    u_KBE, _ = policy.sample(s_BS[:1], K, torch.Generator().manual_seed(2))
    mean, log_sigma = policy.moments(s_BS[:1])
    leaves = [v.detach().requires_grad_() for v in (mean, log_sigma)]
    z_KBE = (u_KBE - leaves[0]) * torch.exp(-leaves[1])
    scores = torch.cat([z_KBE * torch.exp(-leaves[1]), z_KBE.square() - 1], dim=-1)[:, 0].detach()
    # What autograd gives for the same samples, summed, is the sum of these.
    policy.zero_grad()
    policy.log_prob(s_BS[:1], u_KBE).sum().backward()
    torch.testing.assert_close(policy.mean.bias.grad, scores[:, :5].sum(0), rtol=1e-8, atol=1e-8)
    z = scores.mean(0) / (scores.std(0) / K**0.5)
    assert z.abs().max() < 4.5
    shifted = scores + 0.2 * scores.std(0)
    assert (shifted.mean(0) / (shifted.std(0) / K**0.5)).abs().max() > 4.5  # teeth


def test_entropy_is_torch_s_and_moves_only_sigma(case):
    policy, s_BS = case
    expected = policy.distribution(s_BS).entropy().sum(-1)
    torch.testing.assert_close(policy.entropy(s_BS), expected, rtol=0, atol=1e-12)
    policy.entropy(s_BS).mean().backward()
    assert policy.mean.weight.grad is None
    assert policy.spread.weight.grad.abs().min() > 0
    low, high = LOG_SIGMA
    _, log_sigma = policy.moments(100 * s_BS)
    assert low <= log_sigma.min()
    assert log_sigma.max() <= high


def test_refinement_starts_small_and_stays_in_its_box():
    torch.manual_seed(3)
    policy = RefinePolicy(64, 15, bound=0.5)
    s_BS = policy.state(torch.randn(8, 64), torch.rand(8, 15))
    mean, _ = policy.moments(s_BS)
    assert mean.abs().max() < 0.2
    _, a_KBE = policy.sample(s_BS, 50, torch.Generator().manual_seed(0))
    assert a_KBE.abs().max() < 0.5
    assert 0.05 < a_KBE.std() < 0.25


def test_every_parameter_learns_from_the_first_step():
    torch.manual_seed(3)
    policy = RefinePolicy(6, 2)
    s_BS = policy.state(torch.randn(8, 6), torch.rand(8, 2))
    u_KBE, _ = policy.sample(s_BS, 4, torch.Generator().manual_seed(0))
    (torch.randn(4, 8) * policy.log_prob(s_BS, u_KBE)).mean().backward()
    for name, p in policy.named_parameters():
        assert p.grad is not None, name
        assert p.grad.norm() > 0, name


def test_the_state_lets_nothing_back(case):
    policy, _ = case
    e = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    f = torch.randn(2, 3, requires_grad=True)
    s_BS = policy.state(e, f)
    assert s_BS.dtype == torch.float64
    assert not s_BS.requires_grad
    u_KBE, a_KBE = policy.sample(s_BS, 3, torch.Generator().manual_seed(0))
    assert not u_KBE.requires_grad
    assert not a_KBE.requires_grad


def test_the_pathwise_sample_has_a_gradient(case):
    policy, s_BS = case
    u_BE, a_BE = policy.rsample(s_BS, torch.Generator().manual_seed(5))
    u_KBE, _ = policy.sample(s_BS, 1, torch.Generator().manual_seed(5))
    torch.testing.assert_close(u_BE, u_KBE[0])
    a_BE.sum().backward()
    assert policy.mean.bias.grad.abs().min() > 0
    assert policy.spread.bias.grad.abs().min() > 0


def test_the_generator_decides_the_draw(case):
    policy, s_BS = case
    draw = lambda seed: policy.sample(s_BS, 2, torch.Generator().manual_seed(seed))[0]  # noqa: E731
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_errors(case):
    policy, s_BS = case
    with pytest.raises(ValueError, match=r"state has width 7; expected 8 \(prompt 5 \+ features 3"):
        policy.entropy(s_BS[:, :7])
    with pytest.raises(ValueError, match=r"bound is 0; expected > 0"):
        RefinePolicy(2, 2, bound=0)
