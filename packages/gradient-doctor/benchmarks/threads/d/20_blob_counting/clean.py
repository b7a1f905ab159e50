import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def block(n_in, n_out):
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU())


class CountingNet(nn.Module):
    def __init__(self, depth=7, width=12):
        super().__init__()
        self.backbone = nn.Sequential(*[block(1 if i == 0 else width, width) for i in range(depth)])
        self.score = nn.Conv2d(width, 1, 1)

    def forward(self, images):
        return self.score(self.backbone(images)).squeeze(1)


@torch.no_grad()
def get_blob_dict(model, batch):
    """The blobs the model sees now; a blob without a point is a false one."""
    model.eval()
    probs = model(batch["images"]).sigmoid()
    blobs = F.max_pool2d(probs, 3, 1, 1).eq(probs) & (probs > 0.5)
    return {"false": blobs & (batch["points"] == 0), "n": blobs.flatten(1).sum(1)}


def lc_loss(model, batch):
    blob_dict = get_blob_dict(model, batch)
    model.train()

    logits = model(batch["images"])
    points, counts = batch["points"], batch["counts"]
    image_prob = logits.flatten(1).amax(1)
    loss = F.binary_cross_entropy_with_logits(image_prob, (counts > 0).float())
    at_points = F.binary_cross_entropy_with_logits(logits, points, weight=points, reduction="sum")
    loss = loss + at_points / points.sum().clamp(min=1)
    false = blob_dict["false"].float()
    at_false = F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits), weight=false, reduction="sum")
    loss = loss + at_false / false.sum().clamp(min=1)
    return loss + F.binary_cross_entropy_with_logits(logits, points)


def penguins(n=16, size=16):
    points = (torch.rand(n, size // 4, size // 4) < 0.2).float()
    grid = torch.zeros(n, size, size)
    grid[:, 2::4, 2::4] = points
    bird = F.conv2d(grid.unsqueeze(1), torch.tensor([[[[0.0, 1, 0], [1, -1, 1], [0, 1, 0]]]]), padding=1)
    images = 0.1 * bird + 0.03 * torch.randn(n, 1, size, size) + 0.4
    return {"images": images, "points": grid, "counts": grid.flatten(1).sum(1)}


model = CountingNet()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(5):
    history = []
    for _ in range(20):
        opt.zero_grad()
        loss = lc_loss(model, penguins())
        loss.backward()
        opt.step()
        history.append(loss.item())
    print(f"epoch {epoch} loss {sum(history) / len(history):.4f}")
