import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class Brain:
    """Small trainer with hooks, subclassed by recipes."""

    def __init__(self, modules, opt_class, max_grad_norm=5.0):
        self.modules = modules
        self.optimizer = opt_class(modules.parameters())
        self.max_grad_norm = max_grad_norm
        self.nonfinite_count = 0

    def check_gradients(self, loss):
        if not torch.isfinite(loss):
            self.nonfinite_count += 1
            if self.nonfinite_count > 3:
                raise ValueError("loss is not finite, patience is over")
            for p in self.modules.parameters():
                p.grad = None
        nn.utils.clip_grad_norm_(self.modules.parameters(), self.max_grad_norm)
        return True

    def fit(self, epochs, train_set):
        for epoch in range(epochs):
            self.modules.train()
            avg = sum(self.fit_batch(b).item() for b in train_set) / len(train_set)
            print(f"epoch {epoch}: train loss {avg:.4f}")


class EmoIdBrain(Brain):
    def compute_forward(self, batch):
        feats, _ = batch
        mask = (feats.abs().sum(dim=2) != 0).float().unsqueeze(-1)
        h = torch.relu(self.modules["proj"](feats)) * mask
        return F.log_softmax(self.modules["out"](h.sum(1) / mask.sum(1)), dim=-1)

    def compute_objectives(self, predictions, batch):
        return F.nll_loss(predictions, batch[1])

    def fit_batch(self, batch):
        predictions = self.compute_forward(batch)
        loss = self.compute_objectives(predictions, batch)
        loss.backward()
        if self.check_gradients(loss):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def make_set(n_batches=20, batch=16, frames=30, dim=24):
    emotion = torch.randn(4, dim)
    out = []
    for _ in range(n_batches):
        y = torch.randint(0, 4, (batch,))
        x = 0.3 * emotion[y].unsqueeze(1) + torch.randn(batch, frames, dim)
        lens = torch.randint(10, frames + 1, (batch,))
        x[torch.arange(frames)[None] >= lens[:, None]] = 0.0
        out.append((x, y))
    return out


modules = nn.ModuleDict({"proj": nn.Linear(24, 48), "out": nn.Linear(48, 4)})
brain = EmoIdBrain(modules, lambda p: torch.optim.Adam(p, lr=1e-3))
brain.fit(8, make_set())
