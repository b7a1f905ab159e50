import torch
import torch.nn as nn

torch.manual_seed(6)


class LamaPooling(nn.Module):
    """last, average, max and attention pooling over the history of observations"""

    def __init__(self, features):
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, 1), nn.Softmax(dim=2))

    def forward(self, history):
        batch, steps, features = history.shape
        x = history.transpose(1, 2)
        last = x[:, :, -1]
        score = self.score(history)
        attended = (x * score).sum(2)
        return torch.cat([last, x.mean(2), x.max(2).values, attended], 1)

    def score(self, history):
        hidden = self.attention[:3](history)
        return self.attention[3](hidden.transpose(1, 2))


class Critic(nn.Module):
    def __init__(self, features=6, hidden=64):
        super().__init__()
        self.pool = LamaPooling(features)
        self.head = nn.Sequential(nn.Linear(4 * features, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, history):
        return self.head(self.pool(history)).squeeze(1)


def replay(n=128, steps=10):
    """the value is decided by the one frame in which the contact sensor (feature 0) fires"""
    history = torch.randn(n, steps, 6)
    history[:, :, 0] = 0
    when = torch.randint(0, steps, (n,))
    history[torch.arange(n), when, 0] = 2.0
    return history, history[torch.arange(n), when, 1:4].sum(1)


critic = Critic()
optimizer = torch.optim.Adam(critic.parameters(), lr=4e-3)
criterion = nn.SmoothL1Loss()
average = None
for update in range(1, 601):
    history, returns = replay()
    loss = criterion(critic(history), returns)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(critic.parameters(), 5.0)
    optimizer.step()
    average = loss.item() if average is None else 0.95 * average + 0.05 * loss.item()
    if update % 120 == 0:
        weight = critic.pool.score(history).detach().squeeze(1).max(1).values.mean()
        print(f"update {update} value loss {average:.4f} largest attention weight {weight:.3f}")
