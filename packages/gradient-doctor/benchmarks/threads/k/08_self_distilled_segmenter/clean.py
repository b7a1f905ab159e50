import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
CLASSES = 5


class Segmenter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x):
        return {"out": self.head(self.body(x))}


def distillation_loss(student_out, teacher_out):
    student = F.log_softmax(student_out, dim=1)
    teacher = F.softmax(teacher_out, dim=1)
    mask = (teacher != 250).float()
    loss = F.kl_div(student, teacher, reduction="none")
    return (loss * mask).sum() / mask.sum()


@torch.no_grad()
def gap(student_net, teacher_net, images):
    p = F.softmax(teacher_net(images)["out"], dim=1)
    q = F.softmax(student_net(images)["out"], dim=1)
    divergence = (p * (p.log() - q.log())).sum(1).mean()
    return divergence.item(), q.max(dim=1).values.mean().item(), p.max(dim=1).values.mean().item()


teacher_net = Segmenter(16).requires_grad_(False)
for p in teacher_net.head.parameters():
    p.mul_(2.0)
teacher_net.eval()
student_net = Segmenter(12)
optimizer = torch.optim.Adam(student_net.parameters(), lr=5e-3)
held_out = torch.randn(4, 3, 16, 16)

for step in range(241):
    images = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        soft = teacher_net(images)["out"]
    loss = distillation_loss(student_net(images)["out"], soft)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 0:
        kl, student_conf, teacher_conf = gap(student_net, teacher_net, held_out)
        print(f"step {step:4d} loss {loss.item():8.4f}  KL to teacher {kl:.4f}  confidence {student_conf:.2f} (teacher {teacher_conf:.2f})")
