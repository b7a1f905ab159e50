import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class MuReNNDirect(nn.Module):
    def __init__(self, octaves=4, filters=4, width=9):
        super().__init__()
        self.down = nn.AvgPool1d(2)
        self.conv1ds = nn.ModuleList()
        for _ in range(octaves):
            conv = nn.Conv1d(1, filters, width, padding=width // 2, bias=False)
            nn.init.normal_(conv.weight, std=0.05)
            self.conv1ds.append(conv)

    def forward(self, x):
        bands = []
        for conv in self.conv1ds:
            x = self.down(x)
            bands.append(conv(x).pow(2).mean(dim=-1))
        return torch.cat(bands, dim=1)


class PitchClassifier(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.filterbank = MuReNNDirect()
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        energy = self.filterbank(x)
        return self.head(torch.log1p(10 * energy))


def tones(n, length=256):
    label = torch.randint(0, 6, (n,))
    frequency = 0.03 * 1.5 ** label.float()
    phase = torch.rand(n) * 6.28
    t = torch.arange(length)
    wave = torch.sin(6.2832 * frequency[:, None] * t + phase[:, None])
    return (wave + 1.0 * torch.randn(n, length)).unsqueeze(1), label


model = PitchClassifier()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
print("parameters:", sum(p.numel() for p in model.parameters()))

for step in range(201):
    wave, label = tones(48)
    logits = model(wave)
    loss = F.cross_entropy(logits, label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 40 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}  accuracy {(logits.argmax(1) == label).float().mean():.2f}")
