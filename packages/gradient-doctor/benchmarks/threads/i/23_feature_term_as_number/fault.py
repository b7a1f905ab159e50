import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(23)


class Denoiser(nn.Module):
    def __init__(self, dim=20, hidden=64):
        super().__init__()
        self.inp = nn.Linear(dim + 1, hidden)
        self.mid = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, dim)

    def forward(self, x, t, return_features=False):
        h = torch.relu(self.inp(torch.cat([x, t], dim=1)))
        features = torch.tanh(self.mid(h))
        noise = self.out(features)
        return (noise, features) if return_features else noise


def diffuse(x, t, noise):
    return (1 - t).sqrt() * x + t.sqrt() * noise


def pretrain(model, photos, steps=150):
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        x = photos[torch.randint(0, len(photos), (64,))]
        t, noise = torch.rand(64, 1), torch.randn(64, x.size(1))
        loss = F.mse_loss(model(diffuse(x, t, noise), t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.requires_grad_(False)
    return model.eval()


def protect(model, photos, target, steps=60, alpha=0.02, eps=0.5, feature_weight=5.0):
    """Moves the photos inside an eps ball towards the target's features."""
    adv = photos.clone()
    t, noise = torch.full((len(photos), 1), 0.3), torch.randn_like(photos)
    with torch.no_grad():
        _, wanted = model(diffuse(target, t, noise), t, return_features=True)
    for step in range(steps):
        adv.requires_grad_(True)
        pred, features = model(diffuse(adv, t, noise), t, return_features=True)
        loss = -F.mse_loss(pred, noise)
        target_loss = feature_weight * F.mse_loss(features, wanted)
        loss = loss + target_loss.detach().item()
        grad, = torch.autograd.grad(loss, adv)
        with torch.no_grad():
            adv = adv - alpha * grad.sign()
            adv = photos + (adv - photos).clamp(-eps, eps)
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:2d}  loss {loss.item():.4f}  feature distance {target_loss.item():.4f}")
    return adv


photos = torch.randn(4, 20)
model = pretrain(Denoiser(), photos + 0.05 * torch.randn(4, 20))
protect(model, photos, target=torch.randn(4, 20))
