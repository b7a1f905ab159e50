import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class AudioEncoder(nn.Module):
    def __init__(self, dim=32, layers=2):
        super().__init__()
        self.pos_conv = nn.Sequential(
            nn.Conv1d(dim, dim, kernel_size=9, padding=4, groups=4),
            nn.GELU(),
        )
        self.layer_norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True) for _ in range(layers)
        )

    def forward(self, x):
        x_conv = self.pos_conv(x.transpose(1, 2))
        x_conv = x_conv.transpose(1, 2)
        x = x + x_conv
        x = self.layer_norm(x)
        for layer in self.layers:
            x = layer(x)
        return x


class SoundClassifier(nn.Module):
    def __init__(self, mel_bins=16, classes=4, dim=32):
        super().__init__()
        self.patch_embedding = nn.Linear(mel_bins * 2, dim)
        self.encoder = AudioEncoder(dim)
        self.predictor = nn.Linear(dim, classes)

    def forward(self, fbank):
        batch, frames, bins = fbank.shape
        patches = fbank.reshape(batch, frames // 2, bins * 2)
        features = self.encoder(self.patch_embedding(patches))
        return self.predictor(features.mean(dim=1))


def spectrograms(n):
    label = torch.randint(0, 4, (n,))
    time = torch.arange(40).view(1, -1, 1)
    centre = 3 + 3 * label.view(-1, 1, 1) + torch.sin(0.3 * time * (1 + label.view(-1, 1, 1)))
    bins = torch.arange(16).view(1, 1, -1)
    return torch.exp(-(bins - centre) ** 2 / 4) + 0.1 * torch.randn(n, 40, 16), label


model = SoundClassifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
for step in range(61):
    fbank, label = spectrograms(16)
    logits = model(fbank)
    loss = F.cross_entropy(logits, label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        print(f"step {step:2d}  loss {loss.item():.4f}  accuracy {(logits.argmax(1) == label).float().mean():.2f}")
