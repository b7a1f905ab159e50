import torch

torch.manual_seed(1)

CROSS = torch.tensor([[1., 0., 1.], [0., 1., 0.], [1., 0., 1.]])


def build_samples(count, cross_ratio):
    grids = torch.rand(count, 3, 3)
    first_cross = int(count * (1 - cross_ratio))
    grids[first_cross:] = CROSS
    flat = grids.reshape(count, 9)
    with_bias = torch.cat([flat, torch.ones(count, 1)], dim=1)
    expected = torch.zeros(count)
    expected[first_cross:] = 1.0
    return with_bias, expected


def mse(y_hat, y):
    return ((y_hat - y) ** 2).mean()


inputs, expected = build_samples(60, 0.33)
weights = torch.nn.Parameter(torch.rand(10) - 0.5)
lr = 0.5


def update(step):
    y_hat = torch.sigmoid(inputs @ weights)
    loss = mse(y_hat, expected)
    loss.backward()
    with torch.no_grad():
        weights.sub_(lr * weights.grad)
        weights.grad.zero_()
    if step % 1000 == 0:
        print(f"step {step:5d}  loss {loss.item():.4f}")


for step in range(4001):
    update(step)

with torch.no_grad():
    on_cross = torch.sigmoid(inputs[-1] @ weights).item()
    on_noise = torch.sigmoid(inputs[:40] @ weights).mean().item()
print(f"output for a cross {on_cross:.3f}, for noise {on_noise:.3f}")
