import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(18)
VOCAB, DIM, TEXT = 16, 32, 4
ARGS = {"tune_vision_tower": True, "lr": 3e-3}


class VisionTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, DIM, kernel_size=4, stride=4)
        self.block = nn.TransformerEncoderLayer(DIM, 4, 64, dropout=0.0, batch_first=True)

    @torch.no_grad()
    def forward(self, images):
        return self.block(self.patch(images).flatten(2).transpose(1, 2))


class TinyVLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision_tower = VisionTower()
        self.connector = nn.Linear(DIM, DIM)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.llm = nn.GRU(DIM, DIM, batch_first=True)
        self.lm_head = nn.Linear(DIM, VOCAB)

    def forward(self, images, ids):
        vision = self.connector(self.vision_tower(images))
        h = torch.cat([vision, self.embed(ids)], dim=1)
        out, _ = self.llm(h)
        return self.lm_head(out[:, -ids.size(1) - 1 : -1])


def get_batch(n=24):
    color = torch.randint(VOCAB // 4, (n,))
    images = torch.randn(n, 3, 12, 12) * 0.3
    images += (color.float() / 2 - 1).view(n, 1, 1, 1) * torch.tensor([1.0, -1.0, 0.5]).view(1, 3, 1, 1)
    ids = (color.unsqueeze(1) * 4 + torch.arange(TEXT)) % VOCAB
    return images, ids


def train():
    model = TinyVLM()
    for p in model.vision_tower.parameters():
        p.requires_grad_(ARGS["tune_vision_tower"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=ARGS["lr"])
    before = model.vision_tower.patch.weight.detach().clone()
    for step in range(25):
        images, ids = get_batch()
        loss = F.cross_entropy(model(images, ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    print("patch change", (model.vision_tower.patch.weight - before).abs().max().item())


if __name__ == "__main__":
    train()
