import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
ENVS, STEPS, LAYERS, HIDDEN, OBS = 16, 24, 2, 16, 3
CHUNK = 6


class RecurrentCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(OBS, HIDDEN, num_layers=LAYERS)
        self.value = nn.Linear(HIDDEN, 1)

    def forward(self, obs, states):
        out, states = self.lstm(obs, states)
        return self.value(out).squeeze(-1), states


class RolloutBuffer:
    def __init__(self):
        self.obs, self.returns, self.hidden, self.cell = [], [], [], []

    def add(self, obs, returns, states):
        self.obs.append(obs)
        self.returns.append(returns)
        self.hidden.append(states[0].transpose(0, 1))
        self.cell.append(states[1].transpose(0, 1))

    def sequences(self):
        starts = range(0, STEPS, CHUNK)
        obs = torch.cat([torch.stack(self.obs[s:s + CHUNK]) for s in starts], dim=1)
        returns = torch.cat([torch.stack(self.returns[s:s + CHUNK]) for s in starts], dim=1)
        hidden = torch.cat([self.hidden[s] for s in starts])
        cell = torch.cat([self.cell[s] for s in starts])
        n_seq = hidden.size(0)
        states = (
            hidden.transpose(0, 1).contiguous(),
            cell.transpose(0, 1).contiguous(),
        )
        return obs, returns, states


def collect(critic):
    buffer = RolloutBuffer()
    states = (torch.zeros(LAYERS, ENVS, HIDDEN), torch.zeros(LAYERS, ENVS, HIDDEN))
    goal = torch.randn(ENVS)
    for t in range(STEPS):
        obs = torch.randn(ENVS, OBS)
        obs[:, 0] = goal if t == 0 else 0.0
        obs[:, 1] = float(t == 0)
        buffer.add(obs, goal + 0.1 * obs[:, 2], states)
        with torch.no_grad():
            _, states = critic(obs.unsqueeze(0), states)
    return buffer


critic = RecurrentCritic()
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
for update in range(1, 81):
    buffer = collect(critic)
    for _ in range(3):
        obs, returns, states = buffer.sequences()
        values, _ = critic(obs, states)
        loss = F.mse_loss(values, returns)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if update % 16 == 0:
        print(f"update {update}  value loss {loss.item():.4f}")
