import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(22)


class DualMemoryCell(nn.Module):
    """Recurrent cell with a temporal memory c and a layer memory m."""

    def __init__(self, n_in, hidden):
        super().__init__()
        self.gates_c = nn.Linear(n_in + hidden, 3 * hidden)
        self.gates_m = nn.Linear(n_in + hidden, 3 * hidden)
        self.output = nn.Linear(2 * hidden, hidden)

    @staticmethod
    def memory(gates, old):
        i, f, g = gates.chunk(3, dim=1)
        delta = torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(f + 1.0) * old + delta, delta

    def forward(self, x, h, c, m):
        c, delta_c = self.memory(self.gates_c(torch.cat([x, h], 1)), c)
        m, delta_m = self.memory(self.gates_m(torch.cat([x, m], 1)), m)
        return torch.tanh(self.output(torch.cat([c, m], 1))), c, m, delta_c, delta_m


class FramePredictor(nn.Module):
    def __init__(self, pixels=16, hidden=32):
        super().__init__()
        self.hidden = hidden
        self.cell = DualMemoryCell(pixels, hidden)
        self.adapter = nn.Linear(hidden, hidden, bias=False)
        self.decode = nn.Linear(hidden, pixels)

    def forward(self, frames, beta):
        h = c = m = torch.zeros(frames.size(0), self.hidden)
        next_frames, decouple_loss = [], []
        for t in range(frames.size(1) - 1):
            h, c, m, delta_c, delta_m = self.cell(frames[:, t], h, c, m)
            next_frames.append(self.decode(h))
            similarity = F.cosine_similarity(self.adapter(delta_c), self.adapter(delta_m), dim=1)
            decouple_loss.append(similarity.abs().mean())
        decouple_loss = torch.mean(torch.stack(decouple_loss, dim=0))
        mse = F.mse_loss(torch.stack(next_frames, dim=1), frames[:, 1:])
        return mse + beta * decouple_loss, mse, decouple_loss


def moving_bump(n, length=8, pixels=16):
    start, speed = torch.rand(n, 1) * pixels, torch.randint(1, 3, (n, 1)).float()
    centre = (start + speed * torch.arange(length)) % pixels
    distance = (torch.arange(pixels) - centre.unsqueeze(-1)).abs()
    return torch.exp(-torch.minimum(distance, pixels - distance) ** 2 / 2.0)


model = FramePredictor()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(200):
    loss, mse, decouple = model(moving_bump(32), beta=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0 or step == 199:
        print(f"step {step:3d}  loss {loss.item():.4f}  mse {mse.item():.4f}  decouple {decouple.item():.4f}")
