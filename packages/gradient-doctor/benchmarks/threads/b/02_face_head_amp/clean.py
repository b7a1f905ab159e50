import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)
NUM_ID, FEAT = 10, 24


class ChannelPReLU(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.slope = nn.Parameter(torch.full((channels,), 0.25, dtype=torch.float32))

    def forward(self, x):
        return torch.where(x > 0, x, self.slope * x)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(FEAT, 64)
        self.act = ChannelPReLU(64)
        self.fc2 = nn.Linear(64, 32)

    def forward(self, x):
        return F.normalize(self.fc2(self.act(self.fc1(x))).float(), dim=-1)


class MarginHead(nn.Module):
    def __init__(self, dim=32, s=16.0, m=0.2):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_ID, dim))
        self.s, self.m = s, m

    def forward(self, emb, label):
        cos = emb @ F.normalize(self.weight, dim=-1).t()
        return self.s * (cos - self.m * F.one_hot(label, NUM_ID))


def main():
    centers = torch.randn(NUM_ID, FEAT)
    backbone, head = Backbone(), MarginHead()
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for it in range(20):
        label = torch.randint(NUM_ID, (32,))
        image = centers[label] + 0.3 * torch.randn(32, FEAT)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            emb = backbone(image)
        loss = F.cross_entropy(head(emb, label), label)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(f"iter {it} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
