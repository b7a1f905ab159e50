import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(6)


class NoteTranscriber(nn.Module):
    def __init__(self, bins=24, hidden=48, pitches=12):
        super().__init__()
        self.conv = nn.Conv1d(bins, hidden, 5, padding=2)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.onset = nn.Linear(hidden, 1)
        self.pitch = nn.Linear(hidden, pitches)

    def forward(self, spec):
        h = torch.relu(self.conv(spec.transpose(1, 2))).transpose(1, 2)
        h, _ = self.rnn(h)
        return self.onset(h).squeeze(-1), self.pitch(h)


def make_segment(frames=40, bins=24, pitches=12):
    """One segment of a song; some segments are rests or long held notes."""
    onset, pitch = torch.zeros(frames), torch.zeros(frames, dtype=torch.long)
    spec = 0.1 * torch.randn(frames, bins)
    n_notes = int(torch.randint(0, 6, (1,)))
    starts = sorted(torch.randperm(frames)[:n_notes].tolist())
    for start, end in zip(starts, starts[1:] + [frames]):
        p = int(torch.randint(0, pitches, (1,)))
        onset[start], pitch[start:end] = 1.0, p
        spec[start:end, 2 * p:2 * p + 2] += 1.0
    return spec.unsqueeze(0), onset, pitch


def split_losses(onset_logits, pitch_logits, onset, pitch):
    on_weight = onset
    frame_loss = F.binary_cross_entropy_with_logits(onset_logits, onset, reduction="none")
    off_weight = 1.0 - onset
    loss_on = torch.dot(frame_loss, on_weight) / torch.sum(on_weight)
    loss_off = torch.dot(frame_loss, off_weight) / torch.sum(off_weight)
    loss_pitch = F.cross_entropy(pitch_logits, pitch)
    return loss_on, loss_off, loss_pitch


model = NoteTranscriber()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
model.train()
running = 0.0
for it in range(240):
    spec, onset, pitch = make_segment()
    onset_logits, pitch_logits = model(spec)
    losses = split_losses(onset_logits[0], pitch_logits[0], onset, pitch)
    loss = sum(losses)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0)
    optimizer.step()
    running += loss.item()
    if it % 30 == 29:
        print(f"segment {it + 1:3d}  mean loss {running / 30:.4f}")
        running = 0.0
