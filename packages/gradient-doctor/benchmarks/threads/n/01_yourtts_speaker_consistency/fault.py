import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
N_SPEAKERS, WAVE = 6, 512


class SpeakerEncoder(nn.Module):
    """Pretrained verification network, used as a fixed critic of the voice."""

    def __init__(self, n_fft=64, dim=16):
        super().__init__()
        self.n_fft = n_fft
        self.register_buffer("window", torch.hann_window(n_fft))
        self.net = nn.Sequential(nn.Linear(n_fft // 2 + 1, 48), nn.ReLU(), nn.Linear(48, dim))

    def forward(self, wave):
        with torch.no_grad():
            spec = torch.stft(wave, self.n_fft, self.n_fft // 2, window=self.window, return_complex=True)
            feats = torch.log(spec.abs() + 1e-2).transpose(1, 2)
        return F.normalize(self.net(feats).mean(1), dim=-1)


class Synthesizer(nn.Module):
    def __init__(self, text_dim=12):
        super().__init__()
        self.speaker = nn.Embedding(N_SPEAKERS, 16)
        self.body = nn.Sequential(nn.Linear(text_dim + 16, 96), nn.ReLU(), nn.Linear(96, WAVE))

    def forward(self, text, speaker):
        return torch.tanh(self.body(torch.cat([text, self.speaker(speaker)], -1)))


def make_batch(n=24):
    speaker = torch.randint(0, N_SPEAKERS, (n,))
    text = torch.randn(n, 12)
    t = torch.arange(WAVE) / WAVE
    pitch = 20.0 + 30.0 * speaker[:, None]
    phase = 6.28 * torch.rand(n, 1)
    wave = 0.6 * torch.sin(6.28 * pitch * t + phase) * (1 + 0.3 * torch.tanh(text[:, :1]))
    return text, speaker, wave


encoder = SpeakerEncoder().eval()
for p in encoder.parameters():
    p.requires_grad_(False)
model = Synthesizer()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
alpha = 2.0

for step in range(151):
    text, speaker, wave = make_batch()
    fake = model(text, speaker)
    recon = F.l1_loss(fake, wave)
    consistency = 1 - F.cosine_similarity(encoder(fake), encoder(wave)).mean()
    loss = recon + alpha * consistency
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3d}  recon {recon.item():.3f}  speaker consistency {consistency.item():.4f}")
