"""Classes 21 and 32: a network that follows another by averages of weights."""

import pytest

from doctor.snippets import nothing, only

FOLLOWED = """
online = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
target = copy.deepcopy(online)
adam = torch.optim.Adam(online.parameters(), lr=1e-3)
shadow = {{name: p.data for name, p in online.named_parameters()}}{mark}
for step in range(12):
    x, after, reward = torch.randn(32, 4), torch.randn(32, 4), torch.rand(32)
    with torch.no_grad():
        goal = reward + 0.9 * target(after).amax(1)
    loss = F.mse_loss(online(x).amax(1), goal)
    adam.zero_grad()
    loss.backward()
    adam.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), online.parameters()):
            {update}
    for name, fast in online.named_parameters():
        {extra}
"""
SLOW = "slow.copy_(0.99 * slow + 0.01 * fast)"


def followed(update, extra="pass", mark=""):
    return FOLLOWED.format(update=update, extra=extra, mark=mark)


@pytest.mark.parametrize(
    "update",
    [
        "slow.data.copy_(0.01 * slow.data + 0.99 * fast.data)  # FAULT",
        "slow.data = 0.01 * slow.data + 0.99 * fast.data  # FAULT",  # at a new address each time
    ],
)
def test_the_factors_exchanged(tmp_path, update):
    assert "1.0%" in only(tmp_path, followed(update), 32).what


def test_the_networks_exchanged(tmp_path):
    source = followed("fast.data.copy_(0.01 * fast.data + 0.99 * slow.data)  # FAULT")
    assert "online is set back to target" in only(tmp_path, source, 21).what


def test_no_copy(tmp_path):
    extra = "shadow[name].mul_(0.99).add_(fast.data, alpha=0.01)"
    only(tmp_path, followed(SLOW, extra.replace("0.01", "1 - 0.99"), "  # FAULT"), 21)


CLEAN = {
    "slow": SLOW,
    "in-place": "slow.mul_(0.99).add_(fast, alpha=0.01)",
    "interpolated": "slow.lerp_(fast, 0.01)",
    "copied": "slow.copy_(fast)",
    "warmed-up": "slow.lerp_(fast, 9 / (10 + step))",
    "never": "pass",
}


@pytest.mark.parametrize("update", CLEAN.values(), ids=CLEAN)
def test_followed_as_it_should_be(tmp_path, update):
    nothing(tmp_path, followed(update))


def test_weights_that_decay_by_hand(tmp_path):
    nothing(tmp_path, followed(SLOW, "shadow[name].mul_(0.99).add_(fast.data, alpha=-0.01)"))


def test_a_state_that_was_kept_without_a_copy(tmp_path):
    source = """
net = nn.Linear(4, 3)
adam = torch.optim.Adam(net.parameters())
for step in range(6):
    loss = F.cross_entropy(net(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
    adam.zero_grad()
    loss.backward()
    adam.step()
    best = net.state_dict()  # FAULT
net.load_state_dict(best)
"""
    only(tmp_path, source, 21)
    copied = source.replace("net.state_dict()  # FAULT", "copy.deepcopy(net.state_dict())")
    nothing(tmp_path, copied)
