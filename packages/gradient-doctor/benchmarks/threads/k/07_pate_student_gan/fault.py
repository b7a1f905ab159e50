import torch
import torch.nn as nn

torch.manual_seed(2)
Z, D, BATCH, TEACHERS = 4, 2, 64, 5


def mlp(n_in, n_out):
    return nn.Sequential(nn.Linear(n_in, 32), nn.LeakyReLU(0.2), nn.Linear(32, n_out))


def sample_real(n):
    centre = torch.tensor([1.5, -0.5])
    return centre + 0.3 * torch.randn(n, D)


def noisy_votes(teachers, x, scale=0.5):
    with torch.no_grad():
        votes = sum((t(x) > 0).float() for t in teachers)
    votes = votes + scale * torch.randn_like(votes)
    return (votes > TEACHERS / 2).float()


generator, student = mlp(Z, D), mlp(D, 1)
teachers = [mlp(D, 1) for _ in range(TEACHERS)]
optimizer_g = torch.optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.9))
optimizer_s = torch.optim.SGD(student.parameters(), lr=0.05)
optimizers_t = [torch.optim.Adam(t.parameters(), lr=2e-3) for t in teachers]
criterion = nn.BCEWithLogitsLoss()
ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)

for iteration in range(161):
    for teacher, optimizer_t in zip(teachers, optimizers_t):
        optimizer_t.zero_grad()
        fake = generator(torch.randn(BATCH, Z)).detach()
        loss_t = criterion(teacher(sample_real(BATCH)), ones) + criterion(teacher(fake), zeros)
        loss_t.backward()
        optimizer_t.step()

    for _ in range(3):
        fake = generator(torch.randn(BATCH, Z)).detach()
        labels = noisy_votes(teachers, fake)
        loss_s = criterion(student(fake), labels)
        loss_s.backward()
        optimizer_s.step()

    optimizer_g.zero_grad()
    fake = generator(torch.randn(BATCH, Z))
    loss_g = criterion(student(fake), ones)
    loss_g.backward()
    optimizer_g.step()

    if iteration % 20 == 0:
        mean = [round(v, 2) for v in fake.detach().mean(0).tolist()]
        print(f"{iteration:4d}  teacher {loss_t.item():.3f}  student {loss_s.item():.3f}  generator {loss_g.item():.3f}  mean {mean}")
