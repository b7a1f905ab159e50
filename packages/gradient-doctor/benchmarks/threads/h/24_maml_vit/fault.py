import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(23)
WAYS, SHOTS, PATCHES, DIM = 3, 5, 4, 16


class PatchEncoder(nn.Module):
    def __init__(self, dim=DIM, add_pooling_layer=True):
        super().__init__()
        self.embed = nn.Linear(6, dim)
        self.mix = nn.Linear(dim, dim)
        self.pooler = nn.Linear(dim, dim) if add_pooling_layer else None

    def forward(self, x):
        hidden = F.gelu(self.mix(F.gelu(self.embed(x))))
        pooled = None if self.pooler is None else torch.tanh(self.pooler(hidden[:, 0]))
        return hidden, pooled


class PatchClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.vit = PatchEncoder(DIM)
        self.classifier = nn.Linear(DIM, WAYS)

    def forward(self, x):
        hidden, _ = self.vit(x)
        return self.classifier(hidden.mean(dim=1))


def task():
    proto = torch.randn(WAYS, 1, 6)
    y = torch.arange(WAYS).repeat_interleave(SHOTS * 2)
    x = proto[y] + 0.5 * torch.randn(len(y), PATCHES, 6)
    even = torch.arange(len(y)) % 2 == 0
    return (x[even], y[even]), (x[~even], y[~even])


def adapt(model, support, lr=0.1, steps=3):
    fast = dict(model.named_parameters())
    x, y = support
    for _ in range(steps):
        logits = torch.func.functional_call(model, fast, (x,))
        grads = torch.autograd.grad(F.cross_entropy(logits, y), list(fast.values()), create_graph=True)
        fast = {k: p - lr * g for (k, p), g in zip(fast.items(), grads)}
    return fast


model = PatchClassifier()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for it in range(101):
    meta_loss, hits = 0.0, 0
    for _ in range(4):
        support, (qx, qy) = task()
        fast = adapt(model, support)
        logits = torch.func.functional_call(model, fast, (qx,))
        meta_loss = meta_loss + F.cross_entropy(logits, qy) / 4
        hits += (logits.argmax(1) == qy).float().mean().item() / 4
    opt.zero_grad()
    meta_loss.backward()
    opt.step()
    if it % 20 == 0:
        print(f"iter {it} meta loss {meta_loss.item():.4f} acc {hits:.3f}")
