import torch
import torch.nn as nn
import torch.nn.functional as F


class ModulatedConv(nn.Module):
    """Frozen convolution whose weight is scaled and shifted by low-rank factors."""

    def __init__(self, conv, rank=2):
        super().__init__()
        self.register_buffer("weight", conv.weight.detach().clone())
        self.register_buffer("bias", conv.bias.detach().clone())
        out_dim, in_dim, k, _ = self.weight.shape
        self.w_mul_out = nn.Parameter(torch.zeros(out_dim, rank))
        self.w_mul_in = nn.Parameter(torch.randn(rank, in_dim) * 0.1)
        self.w_add_out = nn.Parameter(torch.zeros(out_dim, rank))
        self.w_add_in = nn.Parameter(torch.zeros(rank, in_dim * k * k))

    def forward(self, x):
        scale = 1 + (self.w_mul_out @ self.w_mul_in)[:, :, None, None]
        shift = (self.w_add_out @ self.w_add_in).view_as(self.weight)
        return F.conv2d(x, self.weight * scale + shift, self.bias, padding=1)


def generator(ch=12):
    return nn.Sequential(
        nn.Conv2d(4, ch, 3, padding=1), nn.LeakyReLU(0.2), nn.Upsample(scale_factor=2),
        nn.Conv2d(ch, ch, 3, padding=1), nn.LeakyReLU(0.2),
        nn.Conv2d(ch, 1, 3, padding=1),
    )


def adapt(old):
    layers = [ModulatedConv(m) if isinstance(m, nn.Conv2d) else m for m in old]
    return nn.Sequential(*layers)


def moments(img):
    edges_h, edges_w = img.diff(dim=2), img.diff(dim=3)
    return torch.stack([img.mean(), img.std(), edges_h.abs().mean(), edges_w.abs().mean()])


def main(steps=200):
    torch.manual_seed(21)
    source = generator()
    # the new domain: pictures of an unknown generator, near to the old one but not low-rank
    domain = generator()
    with torch.no_grad():
        for a, b in zip(domain.parameters(), source.parameters()):
            a.copy_(b + 0.15 * torch.randn_like(b))
    g = adapt(source)
    opt = torch.optim.Adam(g.parameters(), lr=5e-3)
    before = {n: p.detach().clone() for n, p in g.named_parameters()}
    for step in range(1, steps + 1):
        z = torch.randn(8, 4, 6, 6)
        with torch.no_grad():
            wanted = domain(z)
        fake = g(z)
        loss = F.l1_loss(fake, wanted) + F.l1_loss(moments(fake), moments(wanted))
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if step % 40 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    moved = {n.split(".")[1]: 0.0 for n in before}
    for n, p in g.named_parameters():
        moved[n.split(".")[1]] += (p - before[n]).norm().item()
    print("moved:", {k: round(v, 3) for k, v in moved.items()})


main()
