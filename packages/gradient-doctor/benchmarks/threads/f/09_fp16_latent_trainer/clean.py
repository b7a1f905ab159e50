import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=0.2)
    ap.add_argument("--clip_grad_norm", type=float, default=1.0)
    ap.add_argument("--max_steps", type=int, default=300)
    ap.add_argument("--grad_accum", type=int, default=2)
    return ap.parse_args([])


class Eps(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 32), nn.SiLU(), nn.Linear(32, 64))
        self.inp = nn.Linear(dim, 64)
        self.mid = nn.Linear(64, 64)
        self.out = nn.Linear(64, dim)

    def forward(self, x, t):
        h = F.silu(self.inp(x) + self.time(t))
        return self.out(F.silu(self.mid(h)) + h)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.model = Eps()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16)
        self.basis = torch.randn(2, 16)

    def micro_batch(self):
        latent = torch.randn(64, 2) @ self.basis
        t = torch.rand(64, 1)
        eps = torch.randn_like(latent)
        return (1 - t) * latent + t * eps, t, eps

    def optimizer_step(self):
        if self.args.clip_grad_norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def run(self):
        log = []
        for step in range(1, self.args.max_steps + 1):
            noisy, t, eps = self.micro_batch()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(self.model(noisy, t).float(), eps)
            self.scaler.scale(loss / self.args.grad_accum).backward()
            log.append(loss.item())
            if step % self.args.grad_accum == 0:
                self.optimizer_step()
            if step % 60 == 0:
                print(f"step {step} loss {sum(log) / len(log):.4f} scale {self.scaler.get_scale():.0f}")
                log.clear()


if __name__ == "__main__":
    torch.manual_seed(555)
    Trainer(parse()).run()
