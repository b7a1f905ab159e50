import torch
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_

torch.manual_seed(0)


class Spotter(nn.Module):
    def __init__(self, mel=10, width=24, keywords=4):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(mel, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 5, padding=2),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(width, keywords)

    def forward(self, feats):
        return self.classifier(self.body(feats).amax(2))


PATTERNS = 0.7 * torch.randn(4, 10, 6)


def utterances(n=32, frames=30):
    keyword = torch.randint(0, 4, (n,))
    feats = torch.randn(n, 10, frames)
    for i, k in enumerate(keyword.tolist()):
        start = torch.randint(0, frames - 6, (1,)).item()
        feats[i, :, start : start + 6] += PATTERNS[k]
    return feats, keyword


class Executor:
    def __init__(self, clip=5.0):
        self.clip = clip
        self.step = 0

    def train(self, model, optimizer, batches):
        model.train()
        total, right = 0.0, 0.0
        for feats, keyword in batches:
            logits = model(feats)
            loss = nn.functional.cross_entropy(logits, keyword)
            loss.backward()
            clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            self.step += 1
            total += loss.item()
            right += (logits.argmax(1) == keyword).float().mean().item()
        return total / len(batches), right / len(batches)


def main(epochs=8):
    model, executor = Spotter(), Executor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(epochs):
        loss, accuracy = executor.train(model, optimizer, [utterances() for _ in range(15)])
        print(f"epoch {epoch} loss {loss:.3f} accuracy {accuracy:.2f}")


main()
