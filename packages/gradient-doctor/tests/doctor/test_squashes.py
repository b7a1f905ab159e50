"""Class 24: squashed actions, widths of draws, bounded ratios; 32: advantages without a minus."""

import pytest

from doctor.snippets import nothing, only

SOFT = """
actor, critic = nn.Linear(3, 4), nn.Linear(5, 1)
optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
for p in critic.parameters():
    p.requires_grad_(False)
for step in range(4):
    s = torch.randn(32, 3)
    mu, log_std = actor(s).chunk(2, -1)
    dist = Normal(mu, log_std.exp())
    u = dist.rsample()
    a = torch.tanh(u)
    {body}
    loss = (0.1 * logp.sum(-1) - critic(torch.cat([s, a], 1)).squeeze(-1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
FAULTS = {
    "none": "logp = dist.log_prob(u)  # FAULT",
    "twice": "logp = dist.log_prob(u) - torch.log(1 - torch.tanh(a) ** 2 + 1e-6)  # FAULT",
    "added": "logp = dist.log_prob(u) + torch.log(1 - a.pow(2) + 1e-6)  # FAULT",
}
RIGHT = {
    "subtracted": "logp = dist.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)",
    "scaled": "logp = dist.log_prob(u) - torch.log(2.0 * (1 - a * a) + 1e-6)",
    "scales": "c = torch.tensor([1.0, 0.3]); "
    "logp = dist.log_prob(u) - torch.log(c * (1 - a.pow(2)) + 1e-6)",
    "softplus": "logp = dist.log_prob(u) - 2 * (0.6931 - u - F.softplus(-2 * u))",
    "negated": "logp = -(torch.log(1 - a.pow(2) + 1e-6) - dist.log_prob(u))",
    "two-logarithms": "logp = dist.log_prob(u) - torch.log(1 - a) - torch.log(1 + a)",
    "no-density": "logp = torch.zeros_like(a)",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_density(tmp_path, fault):
    only(tmp_path, SOFT.format(body=FAULTS[fault]), 24)


@pytest.mark.parametrize("right", RIGHT)
def test_the_density_of_the_action(tmp_path, right):
    nothing(tmp_path, SOFT.format(body=RIGHT[right]))


AUTOENCODER = """
encoder, decoder = nn.Linear(6, 4), nn.Linear(2, 6)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
for step in range(4):
    x = torch.randn(16, 6)
    mu, v = encoder(x).chunk(2, -1)
    {body}
    kl = -0.5 * ({kl}).sum(1).mean()
    loss = F.mse_loss(decoder(z), x) + kl
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
VARIANCE = "1 + v - mu.pow(2) - v.exp()"
DEVIATION = "1 + 2 * v - mu.pow(2) - (2 * v).exp()"


def test_a_variance_for_a_deviation(tmp_path):
    for body in (
        "z = mu + torch.exp(v) * torch.randn_like(mu)  # FAULT",
        "z = Normal(mu, v.exp()).rsample()  # FAULT",
    ):
        assert "variance" in only(tmp_path, AUTOENCODER.format(body=body, kl=VARIANCE), 24).what


def test_one_width(tmp_path):
    half = "z = mu + torch.exp(0.5 * v) * torch.randn_like(mu)"
    whole = "z = mu + torch.exp(v) * torch.randn_like(mu)"
    nothing(tmp_path, AUTOENCODER.format(body=half, kl=VARIANCE))
    nothing(tmp_path, AUTOENCODER.format(body=whole, kl=DEVIATION))


PPO = """
policy = nn.Linear(4, 3)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for update in range(2):
    s, adv = torch.randn(32, 4), torch.randn(32)
    with torch.no_grad():
        a = Categorical(logits=policy(s)).sample()
        old = Categorical(logits=policy(s)).log_prob(a)
    for epoch in range(2):
        new = Categorical(logits=policy(s)).log_prob(a)
        {body}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_the_hopeful_one(tmp_path):
    body = """ratio = torch.exp(new - old)
        bounded = ratio.clamp(0.8, 1.2)
        loss = -torch.{choice}(ratio * {sign}adv, bounded * {sign}adv).mean()"""
    fault = body.format(choice="max", sign="") + "  # FAULT"
    assert "hopeful" in only(tmp_path, PPO.format(body=fault), 24).what
    nothing(tmp_path, PPO.format(body=body.format(choice="min", sign="")))
    cautious = body.format(choice="max", sign="-").replace("= -torch", "= torch")
    nothing(tmp_path, PPO.format(body=cautious))


def test_upside_down(tmp_path):
    body = """ratio = torch.exp(old - new)  # FAULT
        loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()"""
    assert "upside down" in only(tmp_path, PPO.format(body=body), 24).what
    body = """loss = (torch.exp(old - new) - (old - new) - 1).mean()
        loss = loss - (torch.exp(new - old) * adv).mean()"""
    nothing(tmp_path, PPO.format(body=body))


CRITIC = """
policy, value = nn.Linear(4, 3), nn.Linear(4, 1)
optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=1e-3)
for step in range(4):
    s = torch.randn(32, 4)
    dist = Categorical(logits=policy(s))
    a = dist.sample()
    {gain} = torch.randn(32) - value(s).squeeze(-1).detach()
    loss = {sign}(dist.log_prob(a) * {gain}).mean() + value(s).square().mean()  # FAULT
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_advantages_without_a_minus(tmp_path):
    fault = CRITIC.format(gain="advantage", sign="")
    assert "advantage" in only(tmp_path, fault, 32).what


@pytest.mark.parametrize(
    ("gain", "sign", "more"),
    [("advantage", "-", ""), ("excess_cost", "", ""), ("advantage", "", "tour = 1")],
)
def test_advantages_with_a_minus_and_costs(tmp_path, gain, sign, more):
    nothing(tmp_path, CRITIC.format(gain=gain, sign=sign) + f"\n{more}\n")
