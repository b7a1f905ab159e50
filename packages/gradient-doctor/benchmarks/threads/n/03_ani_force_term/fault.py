import torch
import torch.nn as nn

torch.manual_seed(0)


class AtomicNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.CELU(0.1), nn.Linear(32, 32), nn.CELU(0.1), nn.Linear(32, 1))
        self.register_buffer("radii", torch.linspace(0.5, 3.0, 8))

    def forward(self, coordinates):
        delta = coordinates.unsqueeze(2) - coordinates.unsqueeze(1)
        square = (delta ** 2).sum(-1) + torch.eye(coordinates.shape[1]) * 100.0
        distance = square.sqrt()
        aev = torch.exp(-4 * (distance.unsqueeze(-1) - self.radii) ** 2).sum(2)
        return self.layers(aev).squeeze(-1).sum(-1)


def true_energy(coordinates):
    delta = coordinates.unsqueeze(2) - coordinates.unsqueeze(1)
    square = (delta ** 2).sum(-1) + torch.eye(coordinates.shape[1]) * 100.0
    return 0.5 * torch.exp(-square / 2).sum((1, 2))


def dataset(n, atoms=4):
    base = torch.tensor([[0.0, 0, 0], [1.2, 0, 0], [0, 1.2, 0], [0, 0, 1.2]])
    coordinates = (base + 0.25 * torch.randn(n, atoms, 3)).requires_grad_(True)
    energy = true_energy(coordinates)
    force = -torch.autograd.grad(energy.sum(), coordinates)[0]
    return coordinates.detach(), energy.detach(), force.detach()


def train(model, data, epochs=61, force_coefficient=10.0):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    mse = nn.MSELoss()
    coordinates, true_energies, true_forces = data
    for epoch in range(epochs):
        for idx in torch.randperm(len(coordinates)).split(32):
            x = coordinates[idx].clone().requires_grad_(True)
            energies = model(x)
            forces = -torch.autograd.grad(energies.sum(), x, retain_graph=True)[0]
            energy_loss = mse(energies, true_energies[idx])
            force_loss = mse(forces, true_forces[idx])
            loss = energy_loss + force_coefficient * force_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 15 == 0:
            print(f"epoch {epoch:2d}  energy {energy_loss.item():.4f}  force {force_loss.item():.4f}")


train(AtomicNetwork(), dataset(64))
