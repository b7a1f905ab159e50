import torch
import torch.nn as nn

torch.manual_seed(0)


class MaskGenerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(),
                                 nn.Conv2d(8, 1, 3, padding=1), nn.Sigmoid())

    def forward(self, before, after):
        return self.net(torch.cat([before, after], dim=1))


class MaskDiscriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.LeakyReLU(0.2),
                                 nn.Flatten(), nn.Linear(8 * 16, 1))

    def forward(self, mask):
        return self.net(mask)


def scenes(n=16, size=8):
    before = torch.rand(n, 1, size, size)
    mask = (torch.rand(n, 1, size, size) < 0.25).float()
    after = before + mask * 0.8
    return before, after, mask


net_g, net_d = MaskGenerator(), MaskDiscriminator()
optim_g = torch.optim.Adam(net_g.parameters(), lr=5e-3)
optim_d = torch.optim.Adam(net_d.parameters(), lr=5e-3)
bce, l1 = nn.BCEWithLogitsLoss(), nn.L1Loss()
w_adv, w_con = 1.0, 0.2

for step in range(30):
    before, after, gt = scenes()
    fake = net_g(before, after)
    pred_real = net_d(gt)
    pred_fake = net_d(fake)
    err_g = w_adv * bce(pred_fake, torch.ones_like(pred_fake)) + w_con * l1(fake, gt)
    optim_g.zero_grad()
    err_g.backward()
    optim_g.step()

    pred_fake_d = net_d(fake.detach())
    err_d = bce(pred_real, torch.ones_like(pred_real)) + bce(pred_fake_d, torch.zeros_like(pred_fake_d))
    optim_d.zero_grad()
    err_d.backward()
    optim_d.step()
    if step % 6 == 0 or step == 29:
        print(f"step {step:2d} G {err_g.item():.3f} D {err_d.item():.3f} mask mean {fake.mean().item():.3f}")
