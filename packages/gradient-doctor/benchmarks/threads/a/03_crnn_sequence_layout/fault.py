import torch
import torch.nn as nn

torch.manual_seed(0)


class StripReader(nn.Module):
    """Reads a strip of columns and labels every column."""

    def __init__(self, height=4, channels=8, hidden=48, classes=2):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=(height, 1)),
            nn.LeakyReLU(0.1),
        )
        self.rnn = nn.LSTM(channels, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, strip):
        feats = self.cnn(strip)
        seq = feats.squeeze(2).permute(2, 0, 1)
        out, _ = self.rnn(seq)
        scores = self.head(out)
        return scores.permute(1, 0, 2)


def make_strips(n, width=10, height=4):
    ink = torch.randint(0, 2, (n, width))
    strips = ink[:, None, None, :].float().expand(n, 1, height, width).clone()
    strips = strips * 2 - 1 + 0.1 * torch.randn_like(strips)
    labels = torch.zeros_like(ink)
    labels[:, 1:] = ink[:, :-1]
    return strips, labels


def train(model, steps=30):
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(steps):
        strips, labels = make_strips(64)
        scores = model(strips)
        loss = criterion(scores.reshape(-1, 2), labels.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == steps - 1:
            acc = (scores.argmax(-1) == labels).float().mean()
            print(f"step {step:2d} loss {loss.item():.4f} column acc {acc.item():.3f}")


train(StripReader())
