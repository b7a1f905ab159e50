import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

torch.manual_seed(10)


class TileLinear(nn.Module):
    """Linear layer with a fixed output gain, like one crossbar tile."""

    def __init__(self, n_in, n_out, gain=0.8):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in).uniform_(-0.3, 0.3))
        self.bias = nn.Parameter(torch.zeros(n_out))
        self.gain = gain

    def forward(self, x):
        return self.gain * (x @ self.weight.t()) + self.bias


x = torch.tensor([[0.1, 0.2, 0.4, 0.3],
                  [0.2, 0.1, 0.1, 0.3],
                  [0.5, 0.3, 0.2, 0.1]])
y = torch.tensor([[1.0, 0.5], [0.7, 0.3], [0.2, 0.9]])

model = TileLinear(4, 2)
opt = SGD(model.parameters(), lr=0.2)

for epoch in range(60):
    pred = model(x)
    loss = mse_loss(pred, y)
    loss.backward()
    opt.step()
    if epoch % 4 == 0:
        print("epoch", epoch, "loss error: %.5f" % loss.item())
print("final error: %.5f" % mse_loss(model(x), y).item())
