import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(7)


class Counter(nn.Module):
    """How many items are on the shelf? (a whole number)"""

    def __init__(self, n_in, width=32):
        super().__init__()
        self.fc1 = nn.Linear(n_in, width)
        self.fc2 = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.relu(self.fc1(x))
        return self.fc2(h).squeeze(1)


shelf = (torch.rand(300, 12) < 0.4).float()
count = shelf.sum(dim=1)
pixels = shelf + 0.1 * torch.randn_like(shelf)

net = Counter(12)
optim = torch.optim.Adam(net.parameters(), lr=3e-3)

for epoch in range(40):
    order = torch.randperm(300)
    running = 0.0
    for i in range(0, 300, 50):
        idx = order[i:i + 50]
        optim.zero_grad()
        guess = torch.round(net(pixels[idx]))
        loss = F.mse_loss(guess, count[idx])
        loss.backward()
        optim.step()
        running += loss.item()
    if epoch % 8 == 0 or epoch == 39:
        with torch.no_grad():
            hit = (torch.round(net(pixels)) == count).float().mean().item()
        print(f"epoch {epoch:2d}  mse {running / 6:.3f}  exact {hit:.2f}")
