import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
PHONES, DIM, LENGTH = 20, 24, 10


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(PHONES, DIM)
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)

    def forward(self, phones):
        x = self.embed(phones).transpose(1, 2)
        return torch.relu(self.conv(x)).transpose(1, 2)


class DurationPredictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        log_dur = self.net(x).squeeze(-1)
        return torch.exp(log_dur)


class Singer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = TextEncoder()
        self.pitch = nn.Linear(DIM, 1)
        self.duration = DurationPredictor()

    def forward(self, phones):
        h = self.encoder(phones)
        return self.pitch(h).squeeze(-1), self.duration(h)


def duration_loss(dur_pred, dur_gt):
    return F.mse_loss(torch.log(dur_pred + 1), torch.log(dur_gt + 1))


phone_pitch = torch.randn(PHONES)
phone_frames = torch.randint(2, 30, (PHONES,)).float()


def phrases(n):
    phones = torch.randint(0, PHONES, (n, LENGTH))
    stretch = 1.0 + 0.5 * (phones.roll(1, dims=1) % 2)
    return phones, phone_pitch[phones], (phone_frames[phones] * stretch).round()


model = Singer()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(301):
    phones, pitch_gt, dur_gt = phrases(16)
    pitch, dur = model(phones)
    pitch_loss = F.mse_loss(pitch, pitch_gt)
    dur_loss = duration_loss(dur, dur_gt)
    total = pitch_loss + dur_loss
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    if step % 60 == 0:
        print(f"step {step:3d}  pitch {pitch_loss.item():.4f}  duration {dur_loss.item():.4f}")
