import torch
import torch.nn as nn

torch.manual_seed(0)


class DeepRegressor(nn.Module):
    def __init__(self, n_in, width, n_layers):
        super().__init__()
        self.first = nn.Linear(n_in, width)
        self.middle = nn.ModuleList([nn.Linear(width, width) for _ in range(n_layers)])
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for layer in self.middle:
            x = torch.tanh(layer(x))
        return self.last(x)


def target_fn(x):
    return torch.sin(2 * x[:, :1]) * x[:, 1:2] + 0.5 * x[:, 2:3]


def train(model, epochs=30):
    x = torch.randn(256, 3)
    y = target_fn(x)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_fn = nn.MSELoss()
    for epoch in range(epochs):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        if epoch % 6 == 0 or epoch == epochs - 1:
            print(f"epoch {epoch:2d} loss {loss.item():.5f}")


if __name__ == "__main__":
    net = DeepRegressor(3, 32, 3)
    print("parameters:", sum(p.numel() for p in net.parameters()))
    train(net)
