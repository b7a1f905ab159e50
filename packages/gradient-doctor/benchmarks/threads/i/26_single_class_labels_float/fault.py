import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(26)


class TemporalDetector(nn.Module):
    def __init__(self, feat=16, hidden=32, num_classes=1):
        super().__init__()
        self.num_classes = num_classes
        self.backbone = nn.Sequential(
            nn.Conv1d(feat, hidden, 5, padding=2), nn.ReLU(),
            nn.Conv1d(hidden, hidden, 5, padding=2), nn.ReLU(),
        )
        self.cls_head = nn.Conv1d(hidden, num_classes, 3, padding=1)
        self.reg_head = nn.Conv1d(hidden, 2, 3, padding=1)

    def forward(self, feats):
        h = self.backbone(feats)
        return self.cls_head(h).transpose(1, 2), F.softplus(self.reg_head(h)).transpose(1, 2)

    def targets(self, length, segments, labels):
        cls = torch.zeros(length, self.num_classes)
        reg, inside = torch.zeros(length, 2), torch.zeros(length, dtype=torch.bool)
        points = torch.arange(length)
        for (start, end), label in zip(segments, labels):
            hit = (points >= start) & (points <= end)
            cls[hit, label] = 1.0
            reg[hit] = torch.stack([points[hit] - start, end - points[hit]], dim=1).float()
            inside |= hit
        return cls, reg, inside


class ActionVideos:
    def __init__(self, class_map, length=48, feat=16):
        self.class_map, self.length = class_map, length
        self.pattern = torch.randn(feat)

    def annotations(self, n_segments):
        if len(self.class_map) == 1:
            return torch.zeros(n_segments)
        return torch.randint(0, len(self.class_map), (n_segments,))

    def __getitem__(self, index):
        start = int(torch.randint(0, self.length - 12, (1,)))
        end = start + int(torch.randint(4, 12, (1,)))
        feats = 0.5 * torch.randn(self.pattern.numel(), self.length)
        feats[:, start:end + 1] += self.pattern.unsqueeze(1)
        return feats, [(start, end)], self.annotations(1)


data = ActionVideos(class_map=["throw"])
model = TemporalDetector(num_classes=len(data.class_map))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for step in range(150):
    feats, segments, labels = data[step]
    cls_target, reg_target, inside = model.targets(feats.size(1), segments, labels)
    cls, reg = model(feats.unsqueeze(0))
    loss_cls = F.binary_cross_entropy_with_logits(cls[0], cls_target)
    loss_reg = F.smooth_l1_loss(reg[0][inside], reg_target[inside])
    loss = loss_cls + 0.2 * loss_reg
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0 or step == 149:
        print(f"step {step:3d}  cls {loss_cls.item():.4f}  reg {loss_reg.item():.4f}")
