import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class HitClassifier(nn.Module):
    def __init__(self, d_in=4, d_h=32, n_classes=5):
        super().__init__()
        self.encoder = nn.Linear(d_in, d_h)
        self.message = nn.Linear(2 * d_h, d_h)
        self.decoder = nn.Linear(d_h, n_classes)
        self.logged = {}

    def forward(self, x, edges):
        h = torch.relu(self.encoder(x))
        src, dst = edges
        msg = torch.relu(self.message(torch.cat([h[src], h[dst]], dim=-1)))
        h = h + torch.zeros_like(h).index_add(0, dst, msg)
        return self.decoder(h)

    def log(self, name, value):
        self.logged.setdefault(name, []).append(float(value))

    def training_step(self, batch, batch_idx):
        x, edges, y = batch
        out = self(x, edges)
        loss = F.cross_entropy(out, y)
        acc = (out.argmax(-1) == y).float().mean()
        self.log("loss/train", loss)
        self.log("recall/train", acc)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=5e-3)


class Trainer:
    def __init__(self, max_epochs):
        self.max_epochs = max_epochs

    def fit(self, module, loader):
        opt = module.configure_optimizers()
        for epoch in range(self.max_epochs):
            module.logged.clear()
            for i, batch in enumerate(loader):
                loss = module.training_step(batch, i)
                if loss is None:
                    continue
                opt.zero_grad()
                loss.backward()
                opt.step()
            summary = "  ".join(f"{k} {sum(v) / len(v):.4f}" for k, v in module.logged.items())
            print(f"epoch {epoch + 1}  {summary}")


def make_event(n=80):
    y = torch.randint(0, 5, (n,))
    x = torch.randn(n, 4) + torch.stack([y == k for k in range(4)], 1).float() * 2.0
    d = torch.cdist(x, x) + 1e6 * torch.eye(n)
    nearest = d.topk(4, largest=False).indices
    src = nearest.flatten()
    dst = torch.arange(n).repeat_interleave(4)
    return x, (src, dst), y


events = [make_event() for _ in range(20)]
Trainer(max_epochs=6).fit(HitClassifier(), events)
