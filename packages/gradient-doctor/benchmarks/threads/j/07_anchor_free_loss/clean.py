import torch
import torch.nn as nn
import torch.nn.functional as F

GRID, CLASSES = 6, 3


class TinyDetector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.SiLU(),
                                  nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.SiLU())
        self.cls = nn.Conv2d(32, CLASSES, 1)
        self.box = nn.Conv2d(32, 4, 1)

    def forward(self, x):
        f = self.body(x)
        return self.cls(f).flatten(2).transpose(1, 2), self.box(f).flatten(2).transpose(1, 2)


class DetectionLoss:
    def __init__(self, cls_gain=0.5, box_gain=1.0):
        self.bce = nn.BCEWithLogitsLoss(reduction="none")
        self.cls_gain, self.box_gain = cls_gain, box_gain

    def __call__(self, pred_scores, pred_boxes, target_scores, target_boxes):
        loss = torch.zeros(2)
        fg_mask = target_scores.sum(-1) > 0
        target_scores_sum = target_scores.sum().clamp(min=1.0)
        loss[0] = self.bce(pred_scores, target_scores).sum() / target_scores_sum
        if fg_mask.any():
            weight = target_scores.sum(-1)[fg_mask]
            dist = F.smooth_l1_loss(pred_boxes[fg_mask], target_boxes[fg_mask], reduction="none").mean(-1)
            loss[1] = (dist * weight).sum() / target_scores_sum
        return loss[0] * self.cls_gain + loss[1] * self.box_gain, loss.detach()


def load_batch(step, n=4):
    img = 0.1 * torch.randn(n, 3, GRID * 4, GRID * 4)
    scores = torch.zeros(n, GRID * GRID, CLASSES)
    boxes = torch.zeros(n, GRID * GRID, 4)
    for b in range(n):
        if step % 12 == 11:  # pure background images
            continue
        cell, c = int(torch.randint(GRID * GRID, (1,))), int(torch.randint(CLASSES, (1,)))
        r, q = divmod(cell, GRID)
        img[b, c, r * 4:r * 4 + 4, q * 4:q * 4 + 4] += 1.0
        scores[b, cell, c] = 1.0
        boxes[b, cell] = torch.tensor([0.5, 0.5, 1.0, 1.0]) * (c + 1) / CLASSES
    return img, scores, boxes


def main():
    torch.manual_seed(0)
    model, compute_loss = TinyDetector(), DetectionLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(241):
        img, scores, boxes = load_batch(step)
        pred_scores, pred_boxes = model(img)
        loss, items = compute_loss(pred_scores, pred_boxes, scores, boxes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"step {step}  cls {items[0]:.4f}  box {items[1]:.4f}")


if __name__ == "__main__":
    main()
