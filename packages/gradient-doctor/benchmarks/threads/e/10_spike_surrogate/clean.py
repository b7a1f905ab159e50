import torch
import torch.nn as nn


class SigmoidSurrogate(torch.autograd.Function):
    """Heaviside in the forward pass, slope of a steep sigmoid in the backward pass"""

    @staticmethod
    def forward(ctx, mem, slope):
        ctx.save_for_backward(mem)
        ctx.slope = slope
        return (mem > 0).float()

    @staticmethod
    def backward(ctx, grad_output):
        (mem,) = ctx.saved_tensors
        sig = torch.sigmoid(ctx.slope * mem)
        grad = grad_output * ctx.slope * sig * (1 - sig)
        return grad, None


class Leaky(nn.Module):
    def __init__(self, beta=0.9, threshold=1.0, slope=25):
        super().__init__()
        self.beta, self.threshold, self.slope = beta, threshold, slope

    def forward(self, current, mem):
        mem = self.beta * mem + current
        spk = SigmoidSurrogate.apply(mem - self.threshold, self.slope)
        return spk, mem - spk.detach() * self.threshold


class Classifier(nn.Module):
    def __init__(self, n_in=16, n_hidden=96, n_out=4):
        super().__init__()
        self.fc1, self.lif1 = nn.Linear(n_in, n_hidden), Leaky()
        self.fc2, self.lif2 = nn.Linear(n_hidden, n_out), Leaky()
        nn.init.constant_(self.fc2.bias, 0.4)

    def forward(self, x, num_steps=12):
        mem1 = torch.zeros(len(x), self.fc1.out_features)
        mem2 = torch.zeros(len(x), self.fc2.out_features)
        count = 0
        for _ in range(num_steps):
            spk1, mem1 = self.lif1(self.fc1(x), mem1)
            spk2, mem2 = self.lif2(self.fc2(spk1), mem2)
            count = count + spk2
        return count


torch.manual_seed(1)
prototypes = 2.0 * torch.randn(4, 16)


def sample(n):
    y = torch.randint(0, 4, (n,))
    return prototypes[y] + 0.5 * torch.randn(n, 16), y


net = Classifier()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(201):
    x, y = sample(64)
    out = net(x)
    loss = nn.functional.cross_entropy(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 40 == 0:
        print(f"step {step:3d} loss {loss:.3f} acc {(out.argmax(1) == y).float().mean():.2f} spikes {out.mean():.2f}")
