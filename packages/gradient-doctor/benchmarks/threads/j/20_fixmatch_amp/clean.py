import torch
import torch.nn as nn
import torch.nn.functional as F


def make_data(n, dim=16, classes=4, centers=None):
    y = torch.randint(0, classes, (n,))
    return centers[y] + 0.6 * torch.randn(n, dim), y


def weak(x):
    return x + 0.05 * torch.randn_like(x)


def strong(x):
    return x * (torch.rand_like(x) > 0.2) + 0.2 * torch.randn_like(x)


class FixMatch:
    def __init__(self, model, lr=0.05, clip=1.0, p_cutoff=0.9, lambda_u=1.0):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
        self.clip, self.p_cutoff, self.lambda_u = clip, p_cutoff, lambda_u

    def losses(self, x_lb, y_lb, x_ulb):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = self.model(torch.cat([x_lb, weak(x_ulb), strong(x_ulb)]))
        logits = logits.float()
        lb, w, s = logits.split([len(x_lb), len(x_ulb), len(x_ulb)])
        prob, pseudo = w.detach().softmax(-1).max(-1)
        mask = (prob > self.p_cutoff).float()
        sup = F.cross_entropy(lb, y_lb)
        unsup = (F.cross_entropy(s, pseudo, reduction="none") * mask).mean()
        return sup, unsup, mask.mean()

    def train_step(self, x_lb, y_lb, x_ulb):
        sup, unsup, ratio = self.losses(x_lb, y_lb, x_ulb)
        total = sup + self.lambda_u * unsup
        self.scaler.scale(total).backward()
        if self.clip > 0:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return sup.item(), ratio.item()


def main():
    torch.manual_seed(0)
    centers = torch.randn(4, 16)
    x_lb, y_lb = make_data(16, centers=centers)
    x_ulb, _ = make_data(1000, centers=centers)
    x_te, y_te = make_data(500, centers=centers)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    alg = FixMatch(model)
    for it in range(1, 201):
        idx = torch.randint(0, len(x_ulb), (56,))
        sup, ratio = alg.train_step(x_lb, y_lb, x_ulb[idx])
        if it % 40 == 0:
            with torch.no_grad():
                acc = (model(x_te).argmax(1) == y_te).float().mean().item()
            print(f"it {it}  sup loss {sup:.4f}  util ratio {ratio:.2f}  test acc {acc:.3f}")


if __name__ == "__main__":
    main()
