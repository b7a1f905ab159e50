import torch
import torch.nn as nn
import torch.nn.functional as F


class Module(nn.Module):
    """the little of a trainer framework that this script needs"""

    def training_step(self, batch, optimizer_idx):
        raise NotImplementedError

    def configure_optimizers(self):
        raise NotImplementedError


class Trainer:
    def __init__(self, max_steps, log_every=100):
        self.max_steps, self.log_every = max_steps, log_every

    def fit(self, module, stream):
        optimizers = module.configure_optimizers()
        for step in range(self.max_steps):
            batch = next(stream)
            logs = {}
            for idx, optimizer in enumerate(optimizers):
                result = module.training_step(batch, idx)
                optimizer.zero_grad()
                result["loss"].backward()
                optimizer.step()
                logs.update(result["log"])
            if (step + 1) % self.log_every == 0:
                print(step + 1, {k: round(v.item(), 3) for k, v in logs.items()}, module.describe())


class RingGAN(Module):
    def __init__(self, latent=4):
        super().__init__()
        self.latent = latent
        self.generator = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2),
                                           nn.Linear(32, 1))

    def sample(self, n):
        return self.generator(torch.randn(n, self.latent))

    def training_step(self, batch, optimizer_idx):
        fake = self.sample(len(batch))
        if optimizer_idx == 0:
            g_loss = F.softplus(-self.discriminator(fake)).mean()
            return {"loss": g_loss, "log": {"g_loss": g_loss}}
        d_real, d_fake = self.discriminator(batch), self.discriminator(fake.detach())
        d_loss = 0.5 * (F.softplus(-d_real).mean() + F.softplus(d_fake).mean())
        return {"loss": d_loss, "log": {"d_loss": d_loss}}

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.9))
                for net in (self.generator, self.discriminator)]

    @torch.no_grad()
    def describe(self):
        radius = self.sample(512).norm(dim=1)
        return f"radius {radius.mean().item():.2f} (2.00) off the ring {(radius - 2).abs().mean().item():.3f}"


def ring(n=128):
    while True:
        angle = 6.2832 * torch.rand(n)
        radius = 2 + 0.05 * torch.randn(n)
        yield torch.stack([radius * angle.cos(), radius * angle.sin()], 1)


torch.manual_seed(0)
Trainer(max_steps=600).fit(RingGAN(), ring())
