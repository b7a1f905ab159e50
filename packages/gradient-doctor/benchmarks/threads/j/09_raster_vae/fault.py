import torch
import torch.nn as nn
import torch.nn.functional as F


class RasterVAE(nn.Module):
    def __init__(self, latent=12):
        super().__init__()
        self.enc = nn.Sequential(nn.Flatten(), nn.Linear(2 * 12 * 12, 96), nn.ReLU())
        self.mu = nn.Linear(96, latent)
        self.log_var = nn.Linear(96, latent)
        self.dec = nn.Sequential(nn.Linear(latent, 96), nn.ReLU(), nn.Linear(96, 3 * 12 * 12))

    def forward(self, raster):
        h = self.enc(raster)
        mu, log_var = self.mu(h), self.log_var(h)
        z = mu + torch.randn_like(mu) * (0.5 * log_var).exp()
        out = self.dec(z).view(-1, 3, 12, 12)
        return out[:, :2], out[:, 2], mu, log_var


def make_scene(n=32, size=12):
    mask = torch.zeros(n, size, size)
    heading = torch.zeros(n, 2, size, size)
    for k in range(n):
        row = int(torch.randint(1, size - 2, (1,)))
        angle = torch.rand(1) * 3.1416
        mask[k, row:row + 2] = 1.0
        heading[k, 0, row:row + 2] = torch.cos(angle)
        heading[k, 1, row:row + 2] = torch.sin(angle)
    return heading, mask


def objective(pred_vec, pred_mask, target_vec, target_mask, mu, log_var):
    vec = F.l1_loss(pred_vec, target_vec, reduction="none").sum(1)
    vec = (vec * target_mask).sum() / target_mask.sum()
    bce = F.binary_cross_entropy_with_logits(target_mask, pred_mask)
    kl = -0.5 * (1 + log_var - mu ** 2 - log_var.exp()).sum(1).mean()
    return {"vector": vec, "mask": bce, "kl": 0.001 * kl}


def main():
    torch.manual_seed(0)
    model = RasterVAE()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for it in range(1, 241):
        heading, mask = make_scene()
        pred_vec, pred_mask, mu, log_var = model(heading)
        losses = objective(pred_vec, pred_mask, heading, mask, mu, log_var)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 60 == 0:
            acc = ((pred_mask > 0) == (mask > 0.5)).float().mean().item()
            parts = "  ".join(f"{k} {v.item():.4f}" for k, v in losses.items())
            print(f"it {it}  {parts}  mask accuracy {acc:.3f}")


if __name__ == "__main__":
    main()
