"""Class 24: the ratio of a policy to itself is not 1."""

import pytest

from doctor.snippets import nothing, only

PPO = """
policy = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)

def squashed(dist, u):
    return dist.log_prob(u).sum(-1) - torch.log(1 - torch.tanh(u).pow(2) + 1e-6).sum(-1)

for update in range(2):
    with torch.no_grad():
        obs = torch.randn(64, 3)
        dist = Normal(policy(obs), 0.7)
        {act}
        adv = torch.randn(64)
    for epoch in range(2):
        dist = Normal(policy(obs), 0.7)
        {new}
        ratio = torch.exp(new - old)
        loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
FAULTS = {
    "no-correction-in-the-buffer": (
        "u = dist.sample(); old = dist.log_prob(u).sum(-1)  # FAULT",
        "new = squashed(dist, u)",
    ),
    "no-correction-in-the-update": (
        "u = dist.sample(); old = squashed(dist, u)",
        "new = dist.log_prob(u).sum(-1)  # FAULT",
    ),
    "another-order": (
        "u = dist.sample(); old = dist.log_prob(u).sum(-1).flip(0)  # FAULT",
        "new = dist.log_prob(u).sum(-1)",
    ),
}
MEANT = {
    "both": ("u = dist.sample(); old = squashed(dist, u)", "new = squashed(dist, u)"),
    "neither": (
        "u = dist.sample(); old = dist.log_prob(u).sum(-1)",
        "new = dist.log_prob(u).sum(-1)",
    ),
    "another-policy": (
        "u = torch.randn(64, 2); old = Normal(torch.zeros(64, 2), 1.0).log_prob(u).sum(-1)",
        "new = dist.log_prob(u).sum(-1)",
    ),
    "dropout": (
        "u = dist.sample(); old = dist.log_prob(u).sum(-1)",
        "new = Normal(F.dropout(policy(obs), 0.5), 0.7).log_prob(u).sum(-1)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_not_one(tmp_path, fault):
    act, new = FAULTS[fault]
    assert "is not 1" in only(tmp_path, PPO.format(act=act, new=new), 24).what


@pytest.mark.parametrize("meant", MEANT)
def test_one(tmp_path, meant):
    act, new = MEANT[meant]
    nothing(tmp_path, PPO.format(act=act, new=new))
