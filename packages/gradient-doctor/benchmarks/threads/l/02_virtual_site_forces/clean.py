import torch
from torch import nn

torch.manual_seed(1)
WEIGHTS = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.5, 0.5], [-1.0, 1.0, 0.0]])


def local_frames(coords):
    weighted = torch.einsum("fa,nad->nfd", WEIGHTS, coords)
    origin = weighted[:, 0, :]

    xy_plane = weighted[:, 1:, :]
    xy_plane = xy_plane / torch.norm(xy_plane, dim=-1).unsqueeze(-1)

    x_hat = xy_plane[:, 0, :]
    z_axis = torch.linalg.cross(x_hat, xy_plane[:, 1, :])
    z_hat = z_axis / torch.norm(z_axis, dim=-1, keepdim=True)
    y_hat = torch.linalg.cross(z_hat, x_hat)
    return origin, torch.stack([x_hat, y_hat, z_hat], dim=1)


class FourSiteWater(nn.Module):
    def __init__(self, offset=0.05, charge=0.6):
        super().__init__()
        self.offset = nn.Parameter(torch.tensor([offset, 0.0, 0.0]))
        self.charge = nn.Parameter(torch.tensor(charge))

    def forward(self, coords, probe):
        origin, frame = local_frames(coords)
        site = origin + torch.einsum("d,ndk->nk", self.offset, frame)
        q = self.charge
        e = -2.0 * q / (site - probe).norm(dim=-1)
        for h in (1, 2):
            e = e + q / (coords[:, h] - probe).norm(dim=-1)
        return e


def sample(n):
    water = torch.tensor([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    coords = water + 0.05 * torch.randn(n, 3, 3)
    probe = torch.nn.functional.normalize(torch.randn(n, 3), dim=-1) * 3.0
    return coords, probe


def energy_and_forces(model, coords, probe):
    coords = coords.clone().requires_grad_(True)
    energy = model(coords, probe)
    grad = torch.autograd.grad(energy.sum(), coords, create_graph=True)[0]
    return energy, -grad


truth = FourSiteWater(offset=0.25, charge=0.52)
model = FourSiteWater()
opt = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(200):
    coords, probe = sample(64)
    with torch.no_grad():
        e_ref = truth(coords, probe)
    e, f = energy_and_forces(model, coords, probe)
    f_ref = energy_and_forces(truth, coords, probe)[1].detach()
    loss = (e - e_ref).pow(2).mean() + (f - f_ref).pow(2).sum((1, 2)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 40 == 39:
        print(f"step {step + 1}  loss {loss.item():.6f}  offset {model.offset[0].item():.3f}  charge {model.charge.item():.3f}")
