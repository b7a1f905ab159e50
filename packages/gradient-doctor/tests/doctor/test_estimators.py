"""Class 24: log-probabilities that are not the sampler's; the score test."""

import pytest
import torch
from torch.distributions import Normal

from doctor.look import look
from gradient_doctor import score_test

LOOP = """\
actor = nn.Linear(3, 2)
log_std = nn.Parameter(torch.zeros(2))
actor.log_std = log_std
critic = nn.Linear(5, 1)
optimizer = torch.optim.SGD(actor.parameters(), lr=1e-2)
for _ in range(3):
    state = torch.randn(16, 3)
    law = Normal(actor(state), log_std.exp())
{body}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
REWARD = "    reward = -(action.detach() - 0.3).square().sum(-1)\n"


def loop(tmp_path, *lines):
    body = "\n".join("    " + line for line in lines)
    return look(tmp_path, LOOP.format(body=body))


SQUASHED = {
    "tanh": "action = torch.tanh(law.sample())",
    "sigmoid-of-detached": "action = law.sample().detach().clone().sigmoid()",
    "clamp": "action = law.sample().clamp(-0.1, 0.1)",
    "scaled": "action = 2.0 * law.sample()",
}


@pytest.mark.parametrize("draw", SQUASHED.values(), ids=SQUASHED)
def test_density_at_a_changed_sample(tmp_path, draw):
    found = loop(
        tmp_path,
        draw,
        "reward = -(action - 0.3).square().sum(-1)",
        "loss = -(law.log_prob(action).sum(-1) * reward).mean()  # HERE",
    )
    finding = found.one(24)
    assert len(finding.parameters) == 3
    assert finding.related


RIGHT = {
    "raw": ("raw = law.sample()", "law.log_prob(raw).sum(-1)"),
    "inverse": ("raw = torch.atanh(torch.tanh(law.sample()))", "law.log_prob(raw).sum(-1)"),
    "loose-bounds": ("raw = law.sample().clamp(-99, 99)", "law.log_prob(raw).sum(-1)"),
    "independent": ("raw = law.sample()", "Independent(law, 1).log_prob(raw)"),
    "transformed": (
        "law = TransformedDistribution(law, [TanhTransform(cache_size=1)]); raw = law.sample()",
        "law.log_prob(raw).sum(-1)",
    ),
}


@pytest.mark.parametrize(("draw", "density"), RIGHT.values(), ids=RIGHT)
def test_density_at_the_sample_itself(tmp_path, draw, density):
    loop(
        tmp_path,
        draw,
        "reward = -(torch.tanh(raw) - 0.3).square().sum(-1)",
        f"loss = -({density} * reward).mean()",
    ).clean()


def test_a_score_function_of_a_live_action(tmp_path):
    lines = (
        "action = law.rsample(){}  # HERE",
        "correction = 2.0 * (0.69 - action - F.softplus(-2.0 * action))",
        "logp = (law.log_prob(action) - correction).sum(-1)",
        "reward = -(action.detach() - 0.3).square().sum(-1)",
        "loss = -(logp * reward).mean()",
    )
    finding = loop(tmp_path, *(line.format("") for line in lines)).one(24)
    assert "rsample" in finding.why
    assert not loop(tmp_path, *(line.format(".detach()") for line in lines)).of(24)


PATHWISE = {
    "sac": "loss = (0.2 * logp - critic(torch.cat([state, action], -1)).squeeze(-1)).mean()",
    "sac-alpha": (
        "alpha = torch.tensor(0.2); q = critic(torch.cat([state, action], -1)).squeeze(-1)\n"
        "    loss = (alpha * logp - q).mean()"
    ),
    "entropy-with-mask": (
        "keep = (torch.arange(16) < 12).float(); q = critic(torch.cat([state, action], -1))\n"
        "    loss = (logp * keep).sum() / keep.sum() - q.mean()"
    ),
}


@pytest.mark.parametrize("loss", PATHWISE.values(), ids=PATHWISE)
def test_pathwise_losses_may_have_live_actions(tmp_path, loss):
    found = loop(tmp_path, "action = law.rsample()", "logp = law.log_prob(action).sum(-1)", loss)
    assert not found.of(24)


def law():
    mean = torch.nn.Parameter(torch.tensor([0.3, -0.2]))
    log_std = torch.nn.Parameter(torch.tensor([0.1, -0.3]))
    return Normal(mean, log_std.exp()), [mean, log_std]


def drawn(mean, log_std, n=64):
    return Normal(mean, log_std.exp()).sample((n,))


def test_the_score_test_knows_the_sampler_s_density():
    _, (mean, log_std) = law()
    before = torch.get_rng_state()

    def sample():
        return drawn(mean, log_std)

    def right(x):
        return Normal(mean, log_std.exp()).log_prob(x).sum(-1)

    def squashed(x):
        return Normal(mean, log_std.exp()).log_prob(torch.tanh(x)).sum(-1)

    def warm(x):
        return Normal(mean, 1.3 * log_std.exp()).log_prob(x).sum(-1)

    good = score_test(sample, right, [mean, log_std], seed=1)
    assert good.passed
    assert abs(good.z) < 4
    for wrong in (squashed, warm):
        bad = score_test(sample, wrong, [mean, log_std], seed=1)
        assert not bad.passed
        assert bad.finding.number == 24
        assert abs(bad.z) > 8
    assert torch.equal(before, torch.get_rng_state())
    assert mean.grad is None


def test_the_score_test_rarely_cries_wolf():
    _, (mean, log_std) = law()
    worst = max(
        abs(
            score_test(
                lambda: drawn(mean, log_std, 8),
                lambda x: Normal(mean, log_std.exp()).log_prob(x).sum(-1),
                [mean, log_std],
                draws=32,
                seed=seed,
            ).z
        )
        for seed in range(30)
    )
    assert worst < 4.5


def test_the_score_test_says_what_it_cannot_test():
    fixed = torch.zeros(2)
    with pytest.raises(ValueError, match="no parameter"):
        score_test(lambda: fixed, lambda x: x, [fixed])
    with pytest.raises(ValueError, match="at least 16"):
        score_test(lambda: fixed, lambda x: x, [torch.nn.Parameter(fixed)], draws=4)
