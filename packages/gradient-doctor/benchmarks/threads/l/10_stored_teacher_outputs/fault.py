import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
N_CLASSES, DIM = 10, 20
prototypes = torch.randn(N_CLASSES, DIM)


def make_split(n):
    y = torch.randint(0, N_CLASSES, (n,))
    return TensorDataset(prototypes[y] + 0.9 * torch.randn(n, DIM), y)


def mlp(width):
    return nn.Sequential(nn.Linear(DIM, width), nn.ReLU(), nn.Linear(width, N_CLASSES))


def loss_fn_kd(outputs, labels, teacher_outputs, alpha=0.9, T=4.0):
    soft = F.kl_div(F.log_softmax(outputs / T, dim=1), F.softmax(teacher_outputs / T, dim=1), reduction="batchmean")
    return soft * (alpha * T * T) + F.cross_entropy(outputs, labels) * (1.0 - alpha)


def accuracy(model, loader):
    model.eval()
    with torch.no_grad():
        hits = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    return hits / len(loader.dataset)


def fetch_teacher_outputs(teacher, loader):
    teacher.eval()
    with torch.no_grad():
        return [teacher(x) for x, _ in loader]


def train_teacher(model, loader, epochs=4):
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()


def train_kd(model, teacher_outputs, loader):
    model.train()
    total = 0.0
    for i, (x, labels) in enumerate(loader):
        outputs = model(x)
        loss = loss_fn_kd(outputs, labels, teacher_outputs[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


train_loader = DataLoader(make_split(2000), batch_size=50, shuffle=True)
val_loader = DataLoader(make_split(1000), batch_size=500)
teacher = mlp(128)
train_teacher(teacher, train_loader)
print(f"teacher val accuracy {accuracy(teacher, val_loader):.3f}")

student = mlp(16)
optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
teacher_outputs = fetch_teacher_outputs(teacher, train_loader)
for epoch in range(8):
    loss = train_kd(student, teacher_outputs, train_loader)
    print(f"epoch {epoch + 1}  kd loss {loss:.4f}  student val accuracy {accuracy(student, val_loader):.3f}")
