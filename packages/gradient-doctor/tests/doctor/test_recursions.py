"""Classes 18 and 24: returns and targets of reinforcement learning."""

import pytest

from doctor.snippets import nothing, only

REINFORCE = """
policy = nn.Linear(4, 2)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

def discounted(rewards, gamma):
    total, out = 0.0, []
    {body}
    return torch.tensor(out)

for episode in range(4):
    dist = Categorical(logits=policy(torch.randn(8, 4)))
    action = dist.sample()
    rewards = [float(torch.randn(())) for _ in range(8)]
    returns = discounted(rewards, 0.9)
    loss = -(dist.log_prob(action) * (returns - returns.mean())).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
FORWARD = {
    "append": """for r in rewards:  # FAULT
        total = r + gamma * total
        out.append(total)""",
    "insert": """for t in range(len(rewards)):  # FAULT
        total = rewards[t] + total * gamma
        out.insert(0, total)""",
}
TURNED = """for r in reversed(rewards):
        total = r + gamma * total
        out.append(total)  # FAULT"""
RIGHT = {
    "insert": """for r in reversed(rewards):
        total = r + gamma * total
        out.insert(0, total)""",
    "turned-back": """for r in rewards[::-1]:
        total = r + gamma * total
        out.append(total)
    out.reverse()""",
    "by-place": """out = [0.0] * len(rewards)
    for t in range(len(rewards) - 1, -1, -1):
        total = rewards[t] + gamma * total
        out[t] = total""",
    "by-the-rest": """n, out = len(rewards), [0.0] * len(rewards)
    for i in range(n):
        total = rewards[n - 1 - i] + gamma * total
        out[n - 1 - i] = total""",
    "an-average": """for r in rewards:
        total = (1 - gamma) * r + gamma * total
        out.append(total)""",
}


@pytest.mark.parametrize("fault", FORWARD)
def test_returns_of_the_past(tmp_path, fault):
    assert "forward" in only(tmp_path, REINFORCE.format(body=FORWARD[fault]), 24).what


def test_returns_in_reverse_order(tmp_path):
    assert "reverse order" in only(tmp_path, REINFORCE.format(body=TURNED), 24).what


@pytest.mark.parametrize("right", RIGHT)
def test_returns(tmp_path, right):
    nothing(tmp_path, REINFORCE.format(body=RIGHT[right]))


DQN = """
net, late = nn.Linear(4, 3), nn.Linear(4, 3)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
gamma = 0.9

def learn(s, a, r, s2, done, next_mask):
    with torch.no_grad():
        values = late(s2)
        {best}
        {target}
    q = net(s).gather(1, a)
    return F.mse_loss(q, target)

for step in range(4):
    s, s2, a = torch.randn(8, 4), torch.randn(8, 4), torch.randint(0, 3, (8, 1))
    done, mask = (torch.rand(8, 1) < 0.2).float(), torch.rand(8, 3) < 0.8
    mask[:, 0] = True
    loss = learn(s, a, torch.randn(8, 1), s2, done, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
BEST = "best = values.masked_fill(~next_mask, -1e9).max(1, keepdim=True).values"
TARGET = "target = r + gamma * (1 - done) * best"


def test_a_target_that_reads_all(tmp_path):
    nothing(tmp_path, DQN.format(best=BEST, target=TARGET))


def test_no_end_of_the_episode(tmp_path):
    target = "target = r + gamma * best  # FAULT"
    assert "done" in only(tmp_path, DQN.format(best=BEST, target=target), 18).what


def test_the_end_by_another_name(tmp_path):
    target = "not_final = s2.isfinite().all(1, True); target = r + gamma * best * not_final"
    nothing(tmp_path, DQN.format(best=BEST, target=target))


def test_forbidden_actions(tmp_path):
    best = "best = values.max(1, keepdim=True).values  # FAULT"
    assert "next_mask" in only(tmp_path, DQN.format(best=best, target=TARGET), 18).what
