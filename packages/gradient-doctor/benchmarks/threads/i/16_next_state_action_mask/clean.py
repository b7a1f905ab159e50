import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(16)
N_STATES, N_ACTIONS, GAMMA = 6, 4, 0.9


class QNet(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(N_STATES, hidden), nn.ReLU(), nn.Linear(hidden, N_ACTIONS))

    def forward(self, state):
        return self.net(F.one_hot(state, N_STATES).float())


class Corridor:
    """Action 0 walks right, action 1 waits; the others exist in some states only."""

    def __init__(self):
        self.legal = torch.zeros(N_STATES, N_ACTIONS, dtype=torch.bool)
        self.legal[:, :2] = True
        self.legal[0, 2] = self.legal[1, 3] = True

    def sample(self, n):
        state = torch.randint(0, N_STATES, (n,))
        action = torch.multinomial(self.legal[state].float(), 1).squeeze(1)
        nxt = torch.where(action == 0, (state + 1).clamp(max=N_STATES - 1), state)
        done = (state == N_STATES - 1) & (action == 0)
        reward = -torch.ones(n)
        return state, action, reward, nxt, done, self.legal[nxt]


class DQN:
    def __init__(self):
        self.model, self.old = QNet(), QNet()
        self.old.load_state_dict(self.model.state_dict())
        self.optim = torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def target_q(self, reward, nxt, done, mask_next):
        with torch.no_grad():
            q_next = self.old(nxt).masked_fill(~mask_next, float("-inf"))
            best = q_next.max(dim=1).values
        return reward + GAMMA * best * (~done).float()

    def learn(self, state, action, reward, nxt, done, mask_next):
        target = self.target_q(reward, nxt, done, mask_next)
        q = self.model(state).gather(1, action.unsqueeze(1)).squeeze(1)
        loss = F.mse_loss(q, target)
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        return loss.item()


env, agent = Corridor(), DQN()
true_value = torch.tensor([-(1 - GAMMA ** (N_STATES - s)) / (1 - GAMMA) for s in range(N_STATES)])
for it in range(1000):
    loss = agent.learn(*env.sample(64))
    if it % 10 == 9:
        agent.old.load_state_dict(agent.model.state_dict())
    if it % 200 == 0 or it == 999:
        with torch.no_grad():
            value = agent.model(torch.arange(N_STATES))[:, 0]
        print(f"{it:4d} td {loss:.4f} value error {(value - true_value).abs().mean().item():.3f}")
