import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class SmallCNN(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv1 = nn.Conv2d(1, ch, 3, padding=1)
        self.conv2 = nn.Conv2d(ch, ch, 3, padding=1, stride=2)
        self.fc = nn.Linear(ch, 4)

    def forward(self, x):
        a = F.relu(self.conv1(x))
        b = F.relu(self.conv2(a))
        return (a, b), self.fc(b.mean(dim=(2, 3)))


def attention(feat):
    return F.normalize(feat.pow(2).mean(1).flatten(1), dim=1)


def attention_gap(fs, ft):
    return (attention(fs) - attention(ft)).pow(2).sum(1).mean()


def images(n):
    label = torch.randint(0, 4, (n,))
    x = 0.3 * torch.randn(n, 1, 8, 8)
    for k in range(n):
        r, c = divmod(int(label[k]), 2)
        x[k, 0, 4 * r:4 * r + 4, 4 * c:4 * c + 4] += 1.0 + torch.eye(4)
    return x, label


teacher, student = SmallCNN(16), SmallCNN(8)
x, y = images(128)
opt_t = torch.optim.Adam(teacher.parameters(), lr=1e-2)
for _ in range(40):
    opt_t.zero_grad()
    F.cross_entropy(teacher(x)[1], y).backward()
    opt_t.step()
teacher.eval()

opt = torch.optim.Adam(student.parameters(), lr=1e-2)
for step in range(90):
    with torch.no_grad():
        t_feats, _ = teacher(x)
    s_feats, logits = student(x)
    gap = sum(attention_gap(fs, ft.detach()) for fs, ft in zip(s_feats, t_feats))
    loss = F.cross_entropy(logits, y) + 5.0 * gap
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 30 == 0 or step == 89:
        print(f"step {step:3d}  loss {loss.item():.4f}  attention gap {gap.item():.4f}")
