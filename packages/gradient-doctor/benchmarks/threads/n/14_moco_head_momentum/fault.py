import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class Moco(nn.Module):
    def __init__(self, in_dim=24, dim=16, queue=256, momentum=0.97, temperature=0.15):
        super().__init__()
        self.encoder_q = nn.Sequential(nn.Linear(in_dim, 64), nn.ReLU(), nn.Linear(64, 32))
        self.encoder_k = copy.deepcopy(self.encoder_q)
        self.head_q = nn.Sequential(nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, dim))
        self.head_k = copy.deepcopy(self.head_q)
        for module in (self.encoder_k, self.head_k):
            module.requires_grad_(False)
        self.momentum, self.temperature = momentum, temperature
        self.register_buffer("queue", F.normalize(torch.randn(queue, dim), dim=1))

    @torch.no_grad()
    def momentum_update(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * self.momentum + q.data * (1.0 - self.momentum)

    @torch.no_grad()
    def enqueue(self, keys):
        self.queue = torch.cat([keys, self.queue])[: len(self.queue)]

    def forward(self, view_q, view_k):
        q = F.normalize(self.head_q(self.encoder_q(view_q)), dim=1)
        with torch.no_grad():
            k = F.normalize(self.head_k(self.encoder_k(view_k)), dim=1)
        positive = (q * k).sum(1, keepdim=True)
        negative = q @ self.queue.clone().T
        logits = torch.cat([positive, negative], 1) / self.temperature
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        return loss, k


prototypes = torch.randn(40, 24)


def two_views(n=32):
    item = prototypes[torch.randint(0, 40, (n,))] + 0.3 * torch.randn(n, 24)
    return item + 0.5 * torch.randn_like(item), item + 0.5 * torch.randn_like(item)


model = Moco()
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.Adam(trainable, lr=3e-3)
for step in range(401):
    loss, keys = model(*two_views())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.momentum_update()
    model.enqueue(keys)
    if step % 100 == 0:
        gap = (model.head_q[1].weight - model.head_k[1].weight).norm().item()
        print(f"step {step:3d}  loss {loss.item():.3f}  head gap {gap:.3f}")
