import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(5)


class TinyDetector(nn.Module):
    """Scores every cell of a small grid and regresses one box per cell."""

    def __init__(self, width=16):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1), nn.SiLU())
        self.obj = nn.Conv2d(width, 1, 1)
        self.box = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        h = self.body(x)
        return self.obj(h), self.box(h)


def make_image(shape_id):
    img, obj, box = 0.05 * torch.randn(1, 8, 8), torch.zeros(1, 8, 8), torch.zeros(2, 8, 8)
    r, c = torch.randint(1, 7, (2,)).tolist()
    img[0, r, c] += 1.0
    if shape_id:
        img[0, r, c - 1:c + 2] += 1.0
    obj[0, r, c] = 1.0
    box[:, r, c] = torch.tensor([0.3, 0.3]) if shape_id == 0 else torch.tensor([0.9, 0.3])
    return img, obj, box


class Trainer:
    def __init__(self, model, batches, nominal=128, batch_size=8):
        self.model, self.batches = model, batches
        self.accumulate = nominal // batch_size
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        self.updates = 0

    def optimizer_step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1

    def train(self, epochs):
        nb, last_opt_step = len(self.batches), -1
        for epoch in range(epochs):
            self.model.train()
            self.optimizer.zero_grad()
            mean = 0.0
            for i, (img, obj, box) in enumerate(self.batches):
                ni = i + nb * epoch
                p_obj, p_box = self.model(img)
                loss = F.binary_cross_entropy_with_logits(p_obj, obj)
                loss = loss + ((p_box - box).pow(2) * obj).sum() / obj.sum()
                (loss / self.accumulate).backward()
                mean += loss.item() / nb
                if ni - last_opt_step >= self.accumulate:
                    self.optimizer_step()
                    last_opt_step = ni
            if epoch % 20 == 0 or epoch == epochs - 1:
                print(f"epoch {epoch:3d}  updates {self.updates:3d}  loss {mean:.4f}")


images = [make_image(0) for _ in range(8)] + [make_image(1) for _ in range(24)]
batches = [tuple(torch.stack(t) for t in zip(*images[k:k + 8])) for k in range(0, 32, 8)]
Trainer(TinyDetector(), batches).train(160)
