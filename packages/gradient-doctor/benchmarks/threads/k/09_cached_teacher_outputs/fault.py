import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
CLASSES, DIM, T, ALPHA = 6, 20, 4.0, 0.9

centres = 1.2 * torch.randn(CLASSES, DIM)
labels = torch.randint(0, CLASSES, (960,))
points = centres[labels] + torch.randn(960, DIM)
train_loader = DataLoader(TensorDataset(points, labels), batch_size=32, shuffle=True)


def network(width):
    return nn.Sequential(nn.Linear(DIM, width), nn.ReLU(), nn.Linear(width, CLASSES))


def loss_fn_kd(outputs, y, teacher_outputs):
    soft = F.kl_div(F.log_softmax(outputs / T, dim=1), F.softmax(teacher_outputs / T, dim=1), reduction="batchmean")
    return soft * ALPHA * T * T + F.cross_entropy(outputs, y) * (1 - ALPHA)


def fetch_teacher_outputs(teacher, loader):
    teacher.eval()
    collected = []
    with torch.no_grad():
        for x, _ in loader:
            collected.append(teacher(x))
    return collected


def train_teacher(teacher):
    optimizer = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    for _ in range(4):
        for x, y in train_loader:
            optimizer.zero_grad()
            F.cross_entropy(teacher(x), y).backward()
            optimizer.step()


teacher, student = network(64), network(8)
train_teacher(teacher)
teacher_outputs = fetch_teacher_outputs(teacher, train_loader)

optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
for epoch in range(8):
    running, hits = 0.0, 0
    for i, (x, y) in enumerate(train_loader):
        output = student(x)
        output_teacher = teacher_outputs[i]
        loss = loss_fn_kd(output, y, output_teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item()
        hits += (output.argmax(1) == y).sum().item()
    print(f"epoch {epoch}: kd loss {running / len(train_loader):.4f}  accuracy {hits / 960:.3f}")
