import torch

torch.manual_seed(0)

FEATURES, RATE, EPOCHS = 5, 0.1, 25


def init_params():
    w = torch.randn(FEATURES, requires_grad=True).view(FEATURES, 1)
    b = torch.zeros(1, requires_grad=True)
    return w, b


def linear(x, w, b):
    return x @ w + b


def squared_loss(pred, y):
    return ((pred - y) ** 2).mean()


def sgd(params, rate):
    for p in params:
        if p.grad is not None:
            p.data -= rate * p.grad
            p.grad.zero_()


def make_data(n=200):
    true_w = torch.tensor([[2.0], [-3.4], [0.5], [1.0], [-1.2]])
    x = torch.randn(n, FEATURES)
    return x, x @ true_w + 4.2 + 0.01 * torch.randn(n, 1)


x, y = make_data()
w, b = init_params()
for epoch in range(EPOCHS):
    loss = squared_loss(linear(x, w, b), y)
    loss.backward()
    sgd([w, b], RATE)
    if epoch % 5 == 0 or epoch == EPOCHS - 1:
        print(f"epoch {epoch:2d} loss {loss.item():.5f}")
print("w", [round(v, 2) for v in w.detach().flatten().tolist()], "b", round(b.item(), 2))
