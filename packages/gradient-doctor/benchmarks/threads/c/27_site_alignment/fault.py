import torch
import torch.nn as nn

torch.manual_seed(0)


class Reconstructor(nn.Module):
    def __init__(self, pixels=20, latent=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, 32), nn.ReLU(), nn.Linear(32, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, pixels))

    def forward(self, x):
        z = self.encoder(x)
        return self.decoder(z), z


BASIS = torch.randn(5, 20)


def site(n, shift):
    picture = torch.tanh(torch.randn(n, 5) @ BASIS) + shift
    return picture + 0.2 * torch.randn(n, 20), picture


class LocalUpdate:
    def __init__(self, weight=0.03):
        self.net, self.critic, self.weight = Reconstructor(), nn.Linear(6, 1), weight
        self.opt_g = torch.optim.Adam(self.net.parameters(), lr=3e-3)
        self.opt_d = torch.optim.Adam(self.critic.parameters(), lr=3e-3)
        self.bce = nn.BCEWithLogitsLoss()
        self.history = []

    def update(self):
        noisy, picture = site(64, 0.8)
        other, _ = site(64, -0.8)
        out, z_here = self.net(noisy)
        z_there = self.net.encoder(other)
        ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)

        loss_d = self.bce(self.critic(z_here.detach()), ones)
        loss_d = loss_d + self.bce(self.critic(z_there.detach()), zeros)
        self.opt_d.zero_grad()
        loss_d.backward()
        self.opt_d.step()

        loss_recon = (out - picture).abs().mean()
        loss_adv = self.bce(self.critic(z_here), zeros) + self.bce(self.critic(z_there), ones)
        loss_adv = loss_adv.detach().item()
        self.history.append(loss_adv)
        loss = loss_recon + self.weight * loss_adv
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        return loss_recon.item(), loss_d.item()


def main(steps=300):
    local = LocalUpdate()
    for step in range(steps):
        recon, disc = local.update()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:3d} reconstruction {recon:.4f} critic {disc:.4f} "
                  f"adversarial {local.history[-1]:.3f}")


main()
