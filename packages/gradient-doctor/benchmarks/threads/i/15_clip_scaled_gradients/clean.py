import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(15)


class Updater:
    """Owns the optimizer, gradient clipping and the gradient scaler."""

    def __init__(self, model, lr=0.05, clip_global_norm=1.0):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14)
        self.clip_global_norm = clip_global_norm

    def update(self, loss):
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_global_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class FrameClassifier(nn.Module):
    def __init__(self, n_feat=40, hidden=96, n_labels=10):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(n_feat, hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(),
            nn.Linear(hidden, n_labels),
        )

    def forward(self, x):
        return self.net(x)


def make_frames(n, prototypes):
    labels = torch.randint(0, len(prototypes), (n,))
    return prototypes[labels] + 2.0 * torch.randn(n, prototypes.size(1)), labels


def main():
    prototypes = torch.randn(10, 40)
    model = FrameClassifier()
    updater = Updater(model)
    model.train()
    for step in range(150):
        features, labels = make_frames(64, prototypes)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(features)
        loss = F.cross_entropy(logits.float(), labels)
        updater.update(loss)
        if step % 25 == 0 or step == 149:
            fer = (logits.argmax(dim=1) != labels).float().mean().item()
            print(f"step {step:3d}  ce {loss.item():.4f}  fer {fer:.3f}")


if __name__ == "__main__":
    main()
