import torch
from torch import nn

torch.manual_seed(0)
N_IN, N_HID, N_OUT, T, BATCH = 20, 40, 2, 40, 64
ALPHA, BETA = 0.9, 0.85


class SurrGradSpike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (10.0 * x.abs() + 1.0) ** 2


spike_fn = SurrGradSpike.apply


def init_weight(n_from, n_to, scale):
    return nn.init.normal_(torch.empty(n_from, n_to, requires_grad=True), std=scale / n_from ** 0.5)


w1 = init_weight(N_IN, N_HID, 1.2)
w2 = init_weight(N_HID, N_OUT, 0.3)
v1 = init_weight(N_HID, N_HID, 0.4)


def run_snn(inputs):
    h1 = torch.einsum("btc,cd->btd", inputs, w1)
    syn = mem = out = torch.zeros(inputs.shape[0], N_HID)
    flt = read = torch.zeros(inputs.shape[0], N_OUT)
    trace, spikes = [], []
    for t in range(T):
        current = h1[:, t] + out @ v1
        out = spike_fn(mem - 1.0)
        syn = ALPHA * syn + current
        mem = (BETA * mem + syn) * (1.0 - out.detach())
        flt = ALPHA * flt + out @ w2
        read = BETA * read + flt
        trace.append(read)
        spikes.append(out)
    return torch.stack(trace, 1), torch.stack(spikes, 1)


def make_batch():
    x = (torch.rand(BATCH, T, N_IN) < 0.03).float()
    first, second = torch.randint(0, 2, (2, BATCH))
    for cue, at in ((first, 5), (second, 18)):
        x[torch.arange(BATCH), at, cue * 5] = 1.0
        x[torch.arange(BATCH), at + 1, cue * 5 + 1] = 1.0
    return x, first


def train(n_iter, lr=5e-3):
    params = [w1, w2, v1]
    optimizer = torch.optim.Adam(params, lr=lr)
    start = [w.detach().clone() for w in (w1, w2, v1)]
    for i in range(1, n_iter + 1):
        x, y = make_batch()
        trace, spikes = run_snn(x)
        loss = nn.functional.cross_entropy(trace[:, 25:].max(1).values, y) + 1e-4 * spikes.sum((1, 2)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 30 == 0:
            moved = [(w.detach() - s).norm().item() for w, s in zip((w1, w2, v1), start)]
            print(f"iter {i}  loss {loss.item():.4f}  change of w1 {moved[0]:.3f}  w2 {moved[1]:.3f}  v1 {moved[2]:.3f}")


train(120)
