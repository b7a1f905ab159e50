import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
CLASSES, FRAMES, HOP = 5, 20, 32


class Fbank(nn.Module):
    def __init__(self, bins=12):
        super().__init__()
        t = torch.arange(HOP).float()
        basis = torch.stack([torch.cos(3.1416 * (t + 0.5) * k / HOP) for k in range(1, bins + 1)])
        self.register_buffer("basis", basis)

    def forward(self, wavs):
        frames = wavs.view(wavs.shape[0], FRAMES, HOP)
        return torch.log1p((frames @ self.basis.T).pow(2))


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.compute_features = Fbank()
        self.enc = nn.GRU(12, 32, batch_first=True)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, wavs):
        feats = self.compute_features(wavs)
        x, _ = self.enc(feats.detach())
        return self.out(x.mean(1))


def utterances(n):
    label = torch.randint(0, CLASSES, (n,))
    t = torch.arange(FRAMES * HOP).float()
    tone = torch.cos(3.1416 * (t[None] + 0.5) * (1 + label[:, None]) / HOP)
    return tone * 0.5 + 0.3 * torch.randn(n, FRAMES * HOP), label


def pretrain(model, steps=60):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        wavs, label = utterances(32)
        loss = F.cross_entropy(model(wavs), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"recognizer loss {loss.item():.3f}")


def attack(model, target=0, budget=0.5, steps=61):
    """One perturbation that makes every utterance sound like the target."""
    delta = torch.zeros(1, FRAMES * HOP, requires_grad=True)
    optimizer = torch.optim.Adam([delta], lr=2e-2)
    for step in range(steps):
        wavs, label = utterances(32)
        logits = model(wavs + delta.clamp(-budget, budget))
        loss = F.cross_entropy(logits, torch.full_like(label, target))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            hit = (logits.argmax(1) == target).float().mean()
            print(f"step {step:2d}  loss {loss.item():.3f}  hits {hit:.3f}  |delta| {delta.detach().abs().max():.3f}")


model = Recognizer()
pretrain(model)
attack(model)
