import torch
import torch.nn.functional as F
from torch import nn, optim

torch.manual_seed(0)
VOCAB, LEN, Z, C = 16, 6, 8, 2


class ControlledVAE(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(LEN * VOCAB, d), nn.ReLU(), nn.Linear(d, 2 * Z))
        self.decoder = nn.Sequential(nn.Linear(Z + C, d), nn.ReLU(), nn.Linear(d, LEN * VOCAB))
        self.discriminator = nn.Sequential(nn.Flatten(), nn.Linear(LEN * VOCAB, d), nn.ReLU(), nn.Linear(d, C))
        self.encoder_params = list(self.encoder.parameters())
        self.decoder_params = list(self.decoder.parameters())
        self.discriminator_params = list(self.discriminator.parameters())

    def decode(self, z, c):
        return self.decoder(torch.cat([z, c], dim=1)).view(-1, LEN, VOCAB)

    def vae_losses(self, x, c):
        mu, logvar = self.encoder(x).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        recon = F.cross_entropy(self.decode(z, c).flatten(0, 1), x.argmax(-1).flatten())
        kl = (0.5 * (mu ** 2 + logvar.exp() - logvar - 1)).sum(1).mean()
        return recon, kl

    def generate(self, n, temp):
        z = torch.randn(n, Z)
        target_c = torch.randint(0, C, (n,))
        soft = torch.softmax(self.decode(z, F.one_hot(target_c, C).float()) / temp, dim=-1)
        return soft, z, target_c


base = torch.randint(0, VOCAB // 2, (4, LEN))


def next_batch(n=64):
    label = torch.randint(0, C, (n,))
    ids = base[torch.randint(0, 4, (n,))] + (VOCAB // 2) * label[:, None] * (torch.arange(LEN) % 2)
    return F.one_hot(ids, VOCAB).float(), label


model = ControlledVAE()
trainer_D = optim.Adam(model.discriminator_params, lr=2e-3)
trainer_G = optim.Adam(model.decoder_params, lr=2e-3)
trainer_E = optim.Adam(model.encoder_params, lr=2e-3)

for it in range(1, 401):
    x, label = next_batch()
    loss_D = F.cross_entropy(model.discriminator(x), label)
    trainer_D.zero_grad()
    loss_D.backward()
    trainer_D.step()

    recon, kl = model.vae_losses(x, F.one_hot(label, C).float())
    soft, z, target_c = model.generate(64, temp=0.7)
    loss_attr_c = F.cross_entropy(model.discriminator(soft), target_c)
    loss_attr_z = F.mse_loss(model.encoder(soft).chunk(2, dim=1)[0], z)
    loss_G = recon + 0.05 * kl + loss_attr_c + 0.5 * loss_attr_z
    trainer_G.zero_grad()
    loss_G.backward()
    trainer_G.step()

    recon, kl = model.vae_losses(x, F.one_hot(label, C).float())
    loss_E = recon + 0.05 * kl
    trainer_E.zero_grad()
    loss_E.backward()
    trainer_E.step()

    if it % 80 == 0:
        print(f"iter {it}  loss_D {loss_D.item():.4f}  attribute loss c {loss_attr_c.item():.4f} z {loss_attr_z.item():.4f}  recon {recon.item():.4f}  kl {kl.item():.3f}")
