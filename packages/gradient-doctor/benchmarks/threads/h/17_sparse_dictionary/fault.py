import torch
import torch.nn as nn

torch.manual_seed(16)
DIM, LATENTS, K, DEAD_AFTER = 16, 96, 4, 15


class TopKDictionary(nn.Module):
    def __init__(self):
        super().__init__()
        w = torch.randn(LATENTS, DIM)
        w = w / w.norm(dim=1, keepdim=True)
        self.enc = nn.Parameter(w.t().clone())
        self.enc_bias = nn.Parameter(torch.linspace(0.0, -8.0, LATENTS))
        self.dec = nn.Parameter(w.clone())
        self.register_buffer("idle", torch.zeros(LATENTS))

    def pre(self, x):
        return torch.relu(x @ self.enc + self.enc_bias)

    def sparse(self, pre, k):
        top = pre.topk(k, dim=1)
        return torch.zeros_like(pre).scatter(1, top.indices, top.values)

    def forward(self, x):
        code = self.sparse(self.pre(x), K)
        fired = (code > 0).any(0)
        self.idle = torch.where(fired, torch.zeros_like(self.idle), self.idle + 1)
        return code @ self.dec


class TopKTrainer:
    def __init__(self, model, lambda_aux=0.5):
        self.model, self.lambda_aux = model, lambda_aux
        self.opt = torch.optim.Adam(model.parameters(), lr=3e-3)

    def aux_loss(self, x, recon):
        dead = self.model.idle > DEAD_AFTER
        if dead.sum() < K:
            return x.new_zeros(())
        logits = x @ self.model.enc + self.model.enc_bias
        masked = logits.masked_fill(~dead, float("-inf"))
        code = self.model.sparse(masked, K)
        residual = (x - recon).detach()
        return (code @ self.model.dec - residual).pow(2).sum(1).mean()

    def compute_loss(self, x):
        recon = self.model(x)
        reconstruction_loss = (recon - x).pow(2).sum(1).mean()
        aux = self.aux_loss(x, recon)
        loss = reconstruction_loss + self.lambda_aux * aux
        log = {"rec": reconstruction_loss.item(), "aux": aux.item(), "total": loss.item()}
        return reconstruction_loss, log

    def step(self, x):
        loss, log = self.compute_loss(x)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return log


atoms = torch.randn(64, DIM)
trainer = TopKTrainer(TopKDictionary())
for it in range(801):
    pick = torch.rand(256, 64) < 0.05
    x = pick.float() @ atoms
    log = trainer.step(x)
    if it % 100 == 0:
        dead = int((trainer.model.idle > DEAD_AFTER).sum())
        print(f"{it:4d} rec {log['rec']:.3f} aux {log['aux']:.3f} dead latents {dead}")
