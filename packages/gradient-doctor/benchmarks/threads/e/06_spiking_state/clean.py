import torch
import torch.nn as nn

torch.manual_seed(0)


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v >= 1.0).to(v.dtype)

    @staticmethod
    def backward(ctx, g):
        (v,) = ctx.saved_tensors
        return g * torch.exp(-2.0 * (v - 1.0).abs())


class LIF(nn.Module):
    """leaky integrate-and-fire layer; keeps its membrane between calls"""

    def __init__(self, features, batch, tau=0.8):
        super().__init__()
        self.tau = tau
        self.register_buffer("v_mem", torch.zeros(batch, features))

    def forward(self, current):
        self.v_mem = self.tau * self.v_mem + current
        spikes = Spike.apply(self.v_mem)
        self.v_mem = self.v_mem - spikes
        return spikes

    def reset_states(self):
        for state in self.buffers():
            state.zero_().detach_()


class SNN(nn.Module):
    def __init__(self, batch):
        super().__init__()
        self.fc1, self.lif1 = nn.Linear(12, 40), LIF(40, batch)
        self.fc2, self.lif2 = nn.Linear(40, 3), LIF(3, batch)

    def forward(self, x):
        return self.lif2(self.fc2(self.lif1(self.fc1(x))))

    def reset_states(self):
        for layer in (self.lif1, self.lif2):
            layer.reset_states()


RATES = torch.rand(3, 12)


def events(batch, steps=15):
    label = torch.randint(0, 3, (batch,))
    return (torch.rand(steps, batch, 12) < RATES[label]).float(), label


batch = 32
net = SNN(batch)
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
for it in range(121):
    net.reset_states()
    raster, label = events(batch)
    counts = sum(net(frame) for frame in raster)
    loss = nn.functional.cross_entropy(counts, label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 30 == 0:
        print(f"it {it:3d} loss {loss.item():.3f} acc {(counts.argmax(1) == label).float().mean().item():.2f}")
