import numpy as np
import torch


class LinearFit(torch.nn.Module):
    def __init__(self, n_features):
        super().__init__()
        self.layer = torch.nn.Linear(n_features, 1, bias=False)

    def forward(self, x):
        x = self.layer(x)
        return x.squeeze(1)


def make_table(n=4000):
    rng = np.random.default_rng(3)
    table = rng.standard_normal((n, 3))
    table[:, :2] *= 100
    table[:, 2] = 5 * table[:, 0] + 3 * table[:, 1] + rng.standard_normal(n)
    return torch.tensor(table, dtype=torch.float32)


torch.manual_seed(0)
table = make_table()
train_x, train_y = table[:, :2], table[:, 2]

net = LinearFit(2)
criterion = torch.nn.MSELoss()
optimizer = torch.optim.RMSprop(net.parameters(), lr=0.05)
batch_size = 100

for epoch in range(20):
    order = torch.randperm(len(train_x))
    total = 0.0
    for start in range(0, len(order), batch_size):
        picked = order[start:start + batch_size]
        optimizer.zero_grad()
        prediction = net(train_x[picked])
        loss = criterion(prediction, train_y[picked])
        loss.backward()
        optimizer.step()
        total += loss.item()
    if epoch % 4 == 3:
        print(f"epoch {epoch + 1:2d}  mse {total / (len(order) // batch_size):12.3f}  w {net.layer.weight.data.flatten().tolist()}")
