import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(17)
SEQ, FEAT, CLASSES = 10, 16, 5


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(FEAT, 48)
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(48, CLASSES)

    def forward(self, x):
        return self.out(self.enc(self.inp(x)))


class Loop:
    def __init__(self, model, clip_val=1.0):
        self.model, self.clip_val = model, clip_val
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu")

    def training_step(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.model(x)
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        return loss

    def optimizer_step(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_val)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def fit(self, data):
        for step, (x, y) in enumerate(data):
            loss = self.training_step(x, y)
            self.scaler.scale(loss).backward()
            self.optimizer_step()
            if step % 5 == 0:
                print(f"step {step} loss {loss.item():.4f}")


def batches(n):
    w = torch.randn(FEAT, CLASSES)
    for _ in range(n):
        x = torch.randn(16, SEQ, FEAT)
        yield x, (x @ w).argmax(-1)


if __name__ == "__main__":
    Loop(Tagger()).fit(batches(30))
