import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(22)
TASKS = {"colour": 3, "shape": 4}
DIM = 12


class TaskHead(nn.Module):
    def __init__(self, n_class):
        super().__init__()
        self.fc = nn.Linear(24, n_class)

    def loss(self, feats, labels):
        labelled = labels >= 0
        if labelled.sum() == 0:
            return (self.fc(feats) * 0).sum()
        return F.cross_entropy(self.fc(feats[labelled]), labels[labelled])


class MultiTaskNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(DIM, 24), nn.ReLU())
        self.heads = nn.ModuleDict({k: TaskHead(n) for k, n in TASKS.items()})

    def losses(self, x, targets):
        feats = self.backbone(x)
        return {k: head.loss(feats, targets[k]) for k, head in self.heads.items()}


def annotated(n, p_missing=0.65):
    x = torch.randn(n, DIM)
    targets = {"colour": x[:, :3].argmax(1), "shape": x[:, 3:7].argmax(1)}
    for k in targets:
        missing = torch.rand(n) < p_missing
        targets[k] = targets[k].masked_fill(missing, -1)
    return x, targets


x, targets = annotated(400)
model = MultiTaskNet()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
BS = 4
for epoch in range(10):
    total = 0.0
    for i in range(0, len(x), BS):
        batch = {k: t[i:i + BS] for k, t in targets.items()}
        parts = model.losses(x[i:i + BS], batch)
        loss = sum(parts.values())
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    print(f"epoch {epoch} mean loss {total * BS / len(x):.4f}")
