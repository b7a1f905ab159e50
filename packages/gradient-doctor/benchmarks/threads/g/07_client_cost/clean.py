import torch
import torch.nn as nn

torch.manual_seed(2)

eta = 0.5
n_class = 4


def client_data(n):
    centers = 3 * torch.randn(n_class, 10)
    label = torch.randint(0, n_class, (n,))
    x = centers[label] + torch.randn(n, 10)
    wrong = torch.rand(n) < 0.05          # some annotators slip
    label[wrong] = torch.randint(0, n_class, (int(wrong.sum()),))
    return x, label


x, label = client_data(640)
client_model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, n_class))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(client_model.parameters(), lr=0.003)

client_model.train()
recent = []
for epoch in range(4):
    perm = torch.randperm(len(x))
    for b, start in enumerate(range(0, len(x), 4)):
        idx = perm[start:start + 4]
        optimizer.zero_grad()
        output = client_model(x[idx])
        loss = criterion(output, label[idx]) / eta
        loss.backward()
        optimizer.step()
        recent.append(loss.item())
        if b % 40 == 39:
            print(f"epoch {epoch} batch {b:3d}  train loss {sum(recent) / len(recent):.4f}")
            recent = []
