import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(59)


class Codebook(nn.Module):
    def __init__(self, size, dim):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(size, dim) * 0.5)

    def forward(self, x):
        chosen = self.codes[torch.cdist(x, self.codes).argmin(1)]
        commit = F.mse_loss(x, chosen.detach())
        learn = F.mse_loss(chosen, x.detach())
        return x + (chosen - x).detach(), commit, learn


class ResidualVQ(nn.Module):
    def __init__(self, stages, size, dim):
        super().__init__()
        self.stages = nn.ModuleList(Codebook(size, dim) for _ in range(stages))

    def forward(self, x):
        out, rest = 0.0, x
        commits, learns = [], []
        for stage in self.stages:
            q, commit, learn = stage(rest)
            rest = rest - q.detach()
            out = out + q
            commits.append(commit)
            learns.append(learn)
        return out, commits, learns


encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 6))
decoder = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 12))
vq = ResidualVQ(3, 16, 6)
params = [*encoder.parameters(), *decoder.parameters(), *vq.parameters()]
opt = torch.optim.Adam(params, lr=3e-3)

data = torch.tanh(torch.randn(512, 4) @ torch.randn(4, 12))
for step in range(241):
    x = data[torch.randint(0, 512, (128,))]
    z = encoder(x)
    q, commits, learns = vq(z)
    rec = F.mse_loss(decoder(q), x)
    loss = rec + 0.25 * sum(commits) + sum(learns)
    if step % 40 == 0:
        later = sum(commits[1:])
        pull = torch.autograd.grad(later, z, retain_graph=True)[0].abs().sum().item()
        print(f"step {step:3d}  rec {rec.item():.4f}  later commits {later.item():.4f}  their pull on z {pull:.6f}")
    opt.zero_grad()
    loss.backward()
    opt.step()
