import numpy as np
import torch
import torch.nn as nn


class NonLinearRegression(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden_1 = nn.Linear(2, 10)
        self.act_1 = nn.ReLU()
        self.hidden_2 = nn.Linear(10, 5)
        self.act_2 = nn.ReLU()
        self.out = nn.Linear(5, 1)

    def forward(self, x):
        x = self.act_1(self.hidden_1(x))
        x = self.act_2(self.hidden_2(x))
        return self.out(x)


np.random.seed(42)
torch.manual_seed(42)
x = np.random.random(1000)
y = np.random.random(1000)
z = x ** 2 + y ** 2

inputs = torch.Tensor(np.transpose([x, y]))
targets = torch.Tensor(z).unsqueeze(1)
train_in, valid_in = inputs[:850], inputs[850:]
train_out, valid_out = targets[:850], targets[850:]

model = NonLinearRegression()
loss_fn = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(1, 501):
    model.train()
    z_pred = model(train_in)
    loss = loss_fn(z_pred, train_out)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if epoch % 100 == 0:
        print(f"epoch {epoch}  training loss {loss.item():.5f}")

model.eval()
with torch.no_grad():
    guess = model(valid_in)
for i in range(4):
    print(f"wanted {valid_out[i].item():.3f}  got {guess[i].item():.3f}")
