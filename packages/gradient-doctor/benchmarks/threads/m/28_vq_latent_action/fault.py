import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class VectorQuantizer(nn.Module):
    def __init__(self, num_codes, dim):
        super().__init__()
        self.codebook = nn.Embedding(num_codes, dim)
        nn.init.uniform_(self.codebook.weight, -1.0 / num_codes, 1.0 / num_codes)

    def forward(self, x):
        indices = torch.cdist(x, self.codebook.weight).argmin(dim=-1)
        z = self.codebook(indices)
        z_q = x + (z - x).detach()
        return z_q, z, x, indices


class LatentActionModel(nn.Module):
    def __init__(self, obs_dim=6, act_dim=3, num_codes=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2 * obs_dim, 48), nn.GELU(), nn.Linear(48, act_dim))
        self.vq = VectorQuantizer(num_codes, act_dim)
        self.decoder = nn.Sequential(nn.Linear(obs_dim + act_dim, 48), nn.GELU(), nn.Linear(48, obs_dim))

    def encode(self, obs, next_obs):
        z_e = self.encoder(torch.cat([obs, next_obs], dim=-1))
        z_q, _, _, indices = self.vq(z_e)
        return z_e, z_q, indices

    def forward(self, obs, next_obs, beta=0.25):
        z_e, z_q, indices = self.encode(obs, next_obs)
        pred = obs + self.decoder(torch.cat([obs, z_q], dim=-1))
        recon_loss = F.mse_loss(pred, next_obs)
        codebook_loss = F.mse_loss(z_q, z_e.detach())
        commit_loss = F.mse_loss(z_e, self.vq.codebook(indices).detach())
        loss = recon_loss + codebook_loss + beta * commit_loss
        return loss, recon_loss, indices


moves = torch.randn(8, 6)


def transitions(batch=64):
    obs = torch.randn(batch, 6)
    return obs, obs + moves[torch.randint(0, 8, (batch,))] + 0.05 * torch.randn(batch, 6)


model = LatentActionModel()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
start = model.vq.codebook.weight.detach().clone()
for step in range(300):
    loss, recon, indices = model(*transitions())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 60 == 59:
        moved = (model.vq.codebook.weight - start).norm().item()
        print(f"step {step + 1}: loss {loss.item():.4f} recon {recon.item():.4f} "
              f"codes used {indices.unique().numel()} codebook moved {moved:.3f}")
