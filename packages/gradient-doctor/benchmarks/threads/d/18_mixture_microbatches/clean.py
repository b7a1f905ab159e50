import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--grad-accum-steps", type=int, default=4)
parser.add_argument("--micro-batch-size", type=int, default=16)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--clip", type=float, default=1.0)
args = parser.parse_args()
torch.manual_seed(args.seed)

centres = 2.5 * torch.randn(args.grad_accum_steps, 6)


class VelocityModel(nn.Module):
    """Velocity of a flow from noise to data, given the name of the dataset."""

    def __init__(self, dim=6, hidden=64, n_sources=args.grad_accum_steps):
        super().__init__()
        self.source = nn.Embedding(n_sources, hidden)
        self.inp = nn.Linear(dim + 1, hidden)
        self.mid = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, dim)

    def forward(self, x, t, source):
        h = F.silu(self.inp(torch.cat([x, t], 1)) + self.source(source))
        return self.out(F.silu(self.mid(h)))


def data_loader():
    """One micro-batch of each source after another."""
    while True:
        for source in range(args.grad_accum_steps):
            latent = centres[source] + 0.3 * torch.randn(args.micro_batch_size, 6)
            yield latent, torch.full((args.micro_batch_size,), source)


def flow_loss(model, x1, source):
    x0, t = torch.randn_like(x1), torch.rand(len(x1), 1)
    velocity = model((1 - t) * x0 + t * x1, t, source)
    return F.mse_loss(velocity, x1 - x0)


model = VelocityModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
ema = [p.detach().clone() for p in model.parameters()]
loader = data_loader()
per_source = torch.zeros(args.grad_accum_steps)
for train_step in range(1, args.steps + 1):
    optimizer.zero_grad(set_to_none=True)
    for micro in range(args.grad_accum_steps):
        x, y = next(loader)
        loss = flow_loss(model, x, y)
        (loss / args.grad_accum_steps).backward()
        per_source[micro] += loss.item() / 50
    nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    with torch.no_grad():
        for e, p in zip(ema, model.parameters()):
            e.lerp_(p, 0.01)
    if train_step % 50 == 0:
        print(f"step {train_step} loss of each source", [round(v, 3) for v in per_source.tolist()])
        per_source.zero_()
