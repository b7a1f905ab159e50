import torch
import torch.nn as nn

torch.manual_seed(0)
PHONES, FEATS, FRAMES = 8, 20, 40


class Brain:
    def __init__(self, model, lr=0.5, max_grad_norm=5.0, auto_mix_prec=True):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self.max_grad_norm = max_grad_norm
        self.scaler = torch.amp.GradScaler("cpu", enabled=auto_mix_prec)

    def compute_loss(self, feats, phones):
        logits = self.model(feats)
        return nn.functional.cross_entropy(logits.transpose(1, 2), phones)

    def check_gradients(self, loss):
        if not torch.isfinite(loss):
            print("loss is not finite, batch skipped")
            return False
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        return True

    def fit_batch(self, feats, phones):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.compute_loss(feats, phones)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if self.check_gradients(loss):
            self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def fit(self, make_batch, epochs, batches):
        for epoch in range(epochs):
            losses = [self.fit_batch(*make_batch()) for _ in range(batches)]
            print(f"epoch {epoch}  train loss {torch.stack(losses).mean().item():.4f}")


class FrameClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.context = nn.Conv1d(FEATS, 32, 5, padding=2)
        self.out = nn.Linear(32, PHONES)

    def forward(self, feats):
        return self.out(torch.relu(self.context(feats.transpose(1, 2)).transpose(1, 2)))


patterns = torch.randn(PHONES, FEATS)


def make_batch(n=8):
    phones = torch.randint(0, PHONES, (n, FRAMES // 4)).repeat_interleave(4, 1)
    return patterns[phones] + torch.randn(n, FRAMES, FEATS), phones


brain = Brain(FrameClassifier())
brain.fit(make_batch, epochs=6, batches=15)
