import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(12)
N_ITEMS, STEPS = 12, 5


class SessionGRU(nn.Module):
    def __init__(self, n_items, hidden=48):
        super().__init__()
        self.hidden_size = hidden
        self.items = nn.Embedding(n_items, 24)
        self.cell = nn.GRUCell(24, hidden)
        self.h2o = nn.Linear(hidden, n_items)

    def init_hidden(self, batch):
        return torch.zeros(batch, self.hidden_size)

    def forward(self, item, hidden):
        hidden = self.cell(self.items(item), hidden)
        return self.h2o(hidden), hidden


def reset_hidden(hidden, finished):
    return hidden * (~finished).float().unsqueeze(1)


def make_clicks(batch):
    """Visitors look at something, browse around, and buy what they saw first."""
    first = torch.randint(0, N_ITEMS, (batch, 1))
    browse = torch.randint(0, N_ITEMS, (batch, STEPS - 2))
    return torch.cat([first, browse, first], dim=1)


def run_sessions(model, clicks, hidden, finished):
    losses = []
    for t in range(clicks.size(1) - 1):
        hidden = reset_hidden(hidden, finished)
        finished = torch.zeros_like(finished)
        logits, hidden = model(clicks[:, t], hidden)
        losses.append(F.cross_entropy(logits, clicks[:, t + 1]))
    return losses, hidden.detach(), torch.ones_like(finished)


model = SessionGRU(N_ITEMS)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
batch = 64
hidden, finished = model.init_hidden(batch), torch.ones(batch, dtype=torch.bool)
for step in range(800):
    losses, hidden, finished = run_sessions(model, make_clicks(batch), hidden, finished)
    loss = torch.stack(losses).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 200 == 0 or step == 799:
        print(f"step {step:4d}  loss {loss.item():.4f}  purchase step {losses[-1].item():.4f}")
