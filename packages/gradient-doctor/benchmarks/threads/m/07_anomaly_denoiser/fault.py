import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)


class Denoiser(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim + 1, 64), nn.SiLU(), nn.Linear(64, dim))

    def forward(self, x, t):
        return self.net(torch.cat([x, t[:, None]], dim=1))


class Segmenter(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * dim, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, x, x_rec):
        return self.net(torch.cat([x, x_rec], dim=1))


def one_step_denoise(model, x, label):
    t = torch.rand(x.shape[0])
    eps = torch.randn_like(x)
    a = (1 - 0.7 * t)[:, None]
    noisy = a.sqrt() * x + (1 - a).sqrt() * eps
    pred = model(noisy, t)
    per_sample = F.mse_loss(pred, eps, reduction="none").mean(dim=1)
    loss = per_sample[label == 0].mean()
    x_rec = (noisy - (1 - a).sqrt() * pred) / a.sqrt()
    return loss, x_rec


def make_data(n=256, dim=16):
    x = torch.sin(torch.linspace(0, 6, dim))[None] + 0.1 * torch.randn(n, dim)
    label = (torch.rand(n) < 0.5).long()
    mask = torch.zeros(n, dim)
    for i in torch.nonzero(label).flatten():
        s = int(torch.randint(0, dim - 4, (1,)))
        mask[i, s:s + 4] = 1
    return x + 1.5 * mask, mask, label


loader = DataLoader(TensorDataset(*make_data()), batch_size=4, shuffle=True)
denoiser, segmenter = Denoiser(), Segmenter()
opt = torch.optim.Adam(list(denoiser.parameters()) + list(segmenter.parameters()), lr=1e-3)
for epoch in range(8):
    total_noise = total_seg = 0.0
    for x, mask, label in loader:
        noise_loss, x_rec = one_step_denoise(denoiser, x, label)
        seg_loss = F.binary_cross_entropy_with_logits(segmenter(x, x_rec), mask)
        loss = noise_loss + seg_loss
        opt.zero_grad()
        loss.backward()
        opt.step()
        total_noise += noise_loss.item()
        total_seg += seg_loss.item()
    print(f"epoch {epoch}: noise {total_noise / len(loader):.4f}  seg {total_seg / len(loader):.4f}")
