import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(6)
FEAT, HIDDEN, CLASSES, ACCUM = 20, 48, 6, 8


class FrameClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(FEAT, HIDDEN, kernel_size=3, padding=1)
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, frames):
        h = torch.relu(self.conv(frames.transpose(1, 2))).mean(-1)
        return self.out(h)


def utterances(n, proto):
    label = torch.randint(CLASSES, (n,))
    frames = proto[label].unsqueeze(1) + 0.7 * torch.randn(n, 30, FEAT)
    return frames, label


def train():
    proto = torch.randn(CLASSES, FEAT) * 1.5
    model = FrameClassifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9)
    accum_n_steps, tokens = 0, 0.0
    optimizer.zero_grad()
    for micro in range(ACCUM * 20):
        frames, label = utterances(8, proto)
        loss = F.cross_entropy(model(frames), label)
        loss.backward()
        tokens += loss.item()
        accum_n_steps += 1
        if accum_n_steps >= ACCUM:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
            if micro // ACCUM % 4 == 0:
                print(f"update {micro // ACCUM} loss {tokens / ACCUM:.4f} grad norm {norm.item():.3f}")
            accum_n_steps, tokens = 0, 0.0
    frames, label = utterances(256, proto)
    print(f"final loss {F.cross_entropy(model(frames), label).item():.4f}")


if __name__ == "__main__":
    train()
