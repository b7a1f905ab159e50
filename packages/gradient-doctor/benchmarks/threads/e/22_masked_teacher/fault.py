import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class EMA:
    """moving average of the student that makes the targets"""

    def __init__(self, model, decay=0.99):
        self.model = model
        self.model.requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def step(self, new_model):
        for old, new in zip(self.model.parameters(), new_model.parameters()):
            old.lerp_(new, 1 - self.decay)


class AudioEncoder(nn.Module):
    def __init__(self, n_in=8, dim=32, depth=2):
        super().__init__()
        self.inp = nn.Linear(n_in, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(depth)
        )
        self.mask_emb = nn.Parameter(torch.randn(dim))
        self.pos = nn.Parameter(0.3 * torch.randn(24, dim))

    def forward(self, x, mask=None):
        h = self.inp(x)
        if mask is not None:
            h = torch.where(mask.unsqueeze(-1), self.mask_emb, h)
        h = h + self.pos
        states = []
        for block in self.blocks:
            h = block(h)
            states.append(h)
        return h, states


class Data2Vec(nn.Module):
    def __init__(self, encoder, dim=32):
        super().__init__()
        self.encoder = encoder
        self.regression_head = nn.Linear(dim, dim)
        self.ema = EMA(self.encoder)

    def forward(self, x, mask):
        out, _ = self.encoder(x, mask)
        pred = self.regression_head(out)
        with torch.no_grad():
            _, states = self.ema.model(x)
            y = sum(F.instance_norm(s.transpose(1, 2)).transpose(1, 2) for s in states) / len(states)
        return pred[mask], y[mask]


def waves(n=32):
    t = torch.arange(24.0)[None, :, None]
    f = 0.2 + 0.5 * torch.rand(n, 1, 1)
    return torch.sin(f * t * torch.linspace(0.5, 1.5, 8) + 6.28 * torch.rand(n, 1, 1))


model = Data2Vec(AudioEncoder())
start = copy.deepcopy(model.encoder.state_dict())
optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=2e-3)
for step in range(241):
    x = waves()
    mask = torch.rand(32, 24) < 0.4
    pred, target = model(x, mask)
    loss = F.smooth_l1_loss(pred, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.ema.step(model.encoder)
    if step % 60 == 0:
        moved = sum((p - start[k]).norm().item() for k, p in model.encoder.named_parameters())
        print(f"step {step} loss {loss.item():.4f} relative to the targets' variance "
              f"{(pred - target).var().item() / target.var().item():.3f} encoder moved by {moved:.2f}")
