import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(30)


class Backbone(nn.Module):
    def __init__(self, width, dim=24, classes=6):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        features = self.body(x)
        return features, self.fc(features)


class DistillationLoss(nn.Module):
    """Cross entropy plus a match of projected student and teacher features."""

    def __init__(self, student_dim, teacher_dim, weight=1.0):
        super().__init__()
        self.embed = nn.Linear(student_dim, teacher_dim)
        self.weight = weight

    def forward(self, student_out, teacher_features, y):
        features, logits = student_out
        z_s = F.normalize(self.embed(features), dim=1)
        z_t = F.normalize(teacher_features, dim=1)
        match = (z_s - z_t).pow(2).sum(dim=1).mean()
        return F.cross_entropy(logits, y) + self.weight * match, match


def make_batch(n, centers):
    y = torch.randint(0, len(centers), (n,))
    return centers[y] + torch.randn(n, centers.size(1)), y


def train_teacher(teacher, centers, steps=150):
    optimizer = torch.optim.Adam(teacher.parameters(), lr=2e-3)
    for _ in range(steps):
        x, y = make_batch(128, centers)
        loss = F.cross_entropy(teacher(x)[1], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return teacher.eval().requires_grad_(False)


centers = torch.randn(6, 24)
teacher = train_teacher(Backbone(width=96), centers)
student = Backbone(width=24)
criterion = DistillationLoss(student_dim=24, teacher_dim=96)
optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
initial = criterion.embed.weight.detach().clone()

student.train()
for step in range(300):
    x, y = make_batch(128, centers)
    with torch.no_grad():
        teacher_features, _ = teacher(x)
    loss, match = criterion(student(x), teacher_features, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0 or step == 299:
        moved = (criterion.embed.weight.detach() - initial).norm().item()
        print(f"step {step:3d}  loss {loss.item():.4f}  match {match.item():.4f}  projector moved {moved:.4f}")
