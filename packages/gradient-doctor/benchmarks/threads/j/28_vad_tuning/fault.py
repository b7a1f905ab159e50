import torch
import torch.nn as nn

CHUNK = 32


class VADDecoder(nn.Module):
    def __init__(self, feat=12, hidden=24):
        super().__init__()
        self.stft = nn.Conv1d(1, feat, 16, stride=8, padding=4)
        self.rnn = nn.LSTMCell(feat, hidden)
        self.decoder = nn.Linear(hidden, 1)

    def forward(self, chunk, state):
        f = torch.relu(self.stft(chunk.unsqueeze(1))).mean(-1)
        state = self.rnn(f, state)
        return self.decoder(state[0]).squeeze(-1), state


def make_audio(batch=16, chunks=10):
    speech = (torch.rand(batch, chunks) < 0.5)
    speech[:, 1::2] = speech[:, ::2]
    t = torch.arange(CHUNK).float()
    voice = torch.sin(0.9 * t) * (0.5 + 0.5 * torch.rand(batch, chunks, 1))
    wave = 0.4 * torch.randn(batch, chunks, CHUNK) + voice * speech.unsqueeze(-1)
    return wave, speech.float()


def train_epoch(model, n_batches, optimizer, criterion):
    model.train()
    losses = []
    for _ in range(n_batches):
        wave, targets = make_audio()
        state, outs = None, []
        for c in range(wave.size(1)):
            out, state = model(wave[:, c], state)
            outs.append(out)
        stacked = torch.stack(outs, dim=1)
        weight = torch.where(targets > 0, 1.0, 0.8)
        loss = (criterion(stacked, targets) * weight).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def validate(model):
    model.eval()
    wave, targets = make_audio(batch=128)
    state, outs = None, []
    for c in range(wave.size(1)):
        out, state = model(wave[:, c], state)
        outs.append(out > 0)
    return (torch.stack(outs, 1) == targets.bool()).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    model = VADDecoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.BCEWithLogitsLoss(reduction="none")
    for epoch in range(6):
        train_loss = train_epoch(model, 25, optimizer, criterion)
        print(f"epoch {epoch}  train loss {train_loss:.4f}  val accuracy {validate(model):.3f}")
