import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
STATES, ACTIONS, GAMMA = 16, 5, 0.5
REWARD = torch.randn(STATES, ACTIONS) + 3 * torch.randn(STATES, 1)
NEXT = torch.randint(0, STATES, (STATES, ACTIONS))


class DuelingDQN(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(STATES, hidden), nn.ReLU())
        self.fc_adv = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, ACTIONS))
        self.fc_val = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x):
        x = self.body(x)
        val, adv = self.fc_val(x), self.fc_adv(x)
        return val + adv - adv.mean(dim=1, keepdim=True)


def optimal_q():
    q = torch.zeros(STATES, ACTIONS)
    for _ in range(300):
        q = REWARD + GAMMA * q.max(1).values[NEXT]
    return q


def td_loss(net, target_net, states, actions):
    q = net(F.one_hot(states, STATES).float()).gather(1, actions[:, None]).squeeze(1)
    with torch.no_grad():
        following = target_net(F.one_hot(NEXT[states, actions], STATES).float()).max(1).values
    return F.smooth_l1_loss(q, REWARD[states, actions] + GAMMA * following)


def play_error(net, q_star):
    """The agent acts on one observation at a time."""
    with torch.no_grad():
        q = torch.cat([net(row[None]) for row in torch.eye(STATES)])
    return (q - q_star).abs().mean()


q_star = optimal_q()
net, target_net = DuelingDQN(), DuelingDQN()
target_net.load_state_dict(net.state_dict())
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
for step in range(801):
    states = torch.randint(0, STATES, (32,))
    actions = torch.randint(0, ACTIONS, (32,))
    loss = td_loss(net, target_net, states, actions)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        target_net.load_state_dict(net.state_dict())
    if step % 200 == 0:
        print(f"step {step:3d}  loss {loss.item():.3f}  |Q - Q*| {play_error(net, q_star).item():.3f}")
