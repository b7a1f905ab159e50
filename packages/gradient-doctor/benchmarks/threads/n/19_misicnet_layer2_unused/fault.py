import torch
import torch.nn as nn

torch.manual_seed(0)
BANDS, ENDMEMBERS, SIZE = 16, 3, 12


def conv_block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.LeakyReLU(0.1))


class UnmixingNet(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.layer1 = conv_block(BANDS, hidden)
        self.layer2 = conv_block(hidden, hidden)
        self.skip = conv_block(BANDS, 4)
        self.layer3 = conv_block(hidden + 4, hidden)
        self.layer4 = nn.Conv2d(hidden, ENDMEMBERS, 1)
        self.endmembers = nn.Conv2d(ENDMEMBERS, BANDS, 1, bias=False)

    def forward(self, x):
        s = self.skip(x)
        out = self.layer1(x)
        out = torch.cat([out, s], 1)
        out = self.layer3(out)
        abundance = self.layer4(out).softmax(1)
        return abundance, self.endmembers(abundance)


def scene():
    spectra = torch.rand(BANDS, ENDMEMBERS)
    grid = torch.stack(torch.meshgrid(*[torch.linspace(0, 1, SIZE)] * 2, indexing="ij"))
    centers = torch.rand(ENDMEMBERS, 2, 1, 1)
    abundance = (-8 * (grid[None] - centers).pow(2).sum(1)).softmax(0)
    image = torch.einsum("be,ehw->bhw", spectra, abundance)
    return image[None], abundance[None]


def simplex_volume(weight):
    w = weight.flatten(1)
    return (w - w.mean(1, keepdim=True)).pow(2).mean()


image, truth = scene()
noisy = image + 0.05 * torch.randn_like(image)
model = UnmixingNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
before = {name: p.detach().clone() for name, p in model.named_parameters()}
for it in range(201):
    abundance, output = model(noisy)
    loss = (output - noisy).pow(2).mean() + 1e-3 * simplex_volume(model.endmembers.weight)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 50 == 0:
        rmse = (output - image).pow(2).mean().sqrt()
        print(f"iteration {it:3d}  loss {loss.item():.5f}  rmse {rmse.item():.4f}")
for name in ("layer1", "layer2", "layer3", "layer4"):
    moved = sum((p - before[n]).abs().sum().item() for n, p in model.named_parameters() if n.startswith(name))
    print(f"{name} moved by {moved:.2f}")
