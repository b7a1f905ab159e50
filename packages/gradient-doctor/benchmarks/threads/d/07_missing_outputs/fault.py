import torch
from torch import nn

torch.manual_seed(2)

n_features, n_outputs = 12, 4
W = 0.3 * torch.randn(n_features, n_outputs)


def make_data(n):
    x = torch.randn(n, n_features)
    y = torch.sin(x @ W) + 0.1 * torch.randn(n, n_outputs)
    # some sensors did not report
    y[torch.rand(n, n_outputs) < 0.2] = float("nan")
    return x, y


def loss_fn(y_pred, y):
    return torch.square(y_pred - y)


def step_loss(model, x, y):
    y_mask = ~torch.isnan(y)
    y_pred = model(x)
    l = loss_fn(y_pred, y)[y_mask]
    assert not torch.isnan(l.detach()).any() or torch.isnan(y_pred).any()
    return l.mean()


m = nn.Sequential(
    nn.Linear(n_features, 64),
    nn.Tanh(),
    nn.Linear(64, 64),
    nn.Tanh(),
    nn.Linear(64, n_outputs),
)
opt = torch.optim.RMSprop(m.parameters(), lr=1e-3)

x_train, y_train = make_data(1024)
for epoch in range(12):
    order = torch.randperm(len(x_train))
    losses = []
    for idx in order.split(32):
        opt.zero_grad()
        l = step_loss(m, x_train[idx], y_train[idx])
        l.backward()
        opt.step()
        losses.append(l.item())
    print(f"epoch {epoch}: first {losses[0]:.4f} mean {sum(losses) / len(losses):.4f}")
