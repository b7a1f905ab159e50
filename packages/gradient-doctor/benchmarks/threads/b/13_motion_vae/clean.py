import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR

torch.manual_seed(12)
FEAT, SEQ, HID, Z = 6, 20, 32, 8
CFG = {"epochs": 8, "lr": 5e-3, "scheduler": False, "step_size": 2, "kl_weight": 1e-3}


class RNNVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.GRU(FEAT, HID, batch_first=True)
        self.mu, self.logvar = nn.Linear(HID, Z), nn.Linear(HID, Z)
        self.dec = nn.GRU(Z, HID, batch_first=True)
        self.out = nn.Linear(HID, FEAT)

    def forward(self, x):
        _, h = self.enc(x)
        mu, logvar = self.mu(h[-1]), self.logvar(h[-1])
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        y, _ = self.dec(z.unsqueeze(1).expand(-1, x.size(1), -1))
        return self.out(y), mu, logvar


def motion(n):
    t = torch.linspace(0, 6.28, SEQ).view(1, SEQ, 1)
    phase = torch.rand(n, 1, 1) * 3
    speed = torch.tensor([1.0, 2.0])[torch.randint(2, (n, 1, 1))]
    return torch.sin(speed * t + phase + torch.arange(FEAT) * 0.3)


def train():
    data = motion(192)
    model = RNNVAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=CFG["lr"])
    if CFG["scheduler"]:
        scheduler = StepLR(optimizer, step_size=CFG["step_size"], gamma=0.2)
    else:
        scheduler = StepLR(optimizer, step_size=CFG["step_size"], gamma=1)
    for epoch in range(CFG["epochs"]):
        total = 0.0
        for batch in data[torch.randperm(192)].split(64):
            recon, mu, logvar = model(batch)
            kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).mean()
            loss = F.mse_loss(recon, batch) + CFG["kl_weight"] * kl
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        scheduler.step()
        print(f"epoch {epoch} loss {total / 3:.4f}")


if __name__ == "__main__":
    train()
