import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(9)
DIM, CLASSES, DTYPE = 512, 20, torch.bfloat16


class MLPBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.fc = nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + F.gelu(self.fc(self.norm(x)))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(MLPBlock(), MLPBlock())
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.blocks(x)))


def load_data():
    centers = torch.randn(CLASSES, DIM) * 0.25
    label = torch.randint(CLASSES, (64,))
    return centers[label] + torch.randn(64, DIM), label


def main():
    x, label = load_data()
    model = Classifier().to(DTYPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    for step in range(30):
        logits = model(x.to(DTYPE))
        loss = F.cross_entropy(logits.float(), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 6 == 0 or step == 29:
            print(f"step {step} loss {loss.item():.4f}")
    moved = sum((p != start[n]).sum().item() for n, p in model.named_parameters())
    total = sum(p.numel() for p in model.parameters())
    print(f"weights moved: {100 * moved / total:.1f}%")


if __name__ == "__main__":
    main()
