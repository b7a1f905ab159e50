import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class PairModel(nn.Module):
    def __init__(self, d_img=24, d_txt=20, dim=16):
        super().__init__()
        self.img = nn.Sequential(nn.Linear(d_img, 32), nn.ReLU(), nn.Linear(32, dim))
        self.txt = nn.Sequential(nn.Linear(d_txt, 32), nn.ReLU(), nn.Linear(32, dim))

    def image_encoder(self, x):
        return F.normalize(self.img(x), dim=1)

    def text_encoder(self, t):
        with torch.no_grad():
            out = self.txt(t)
        return F.normalize(out, dim=1)

    def forward(self, x, t):
        return self.image_encoder(x), self.text_encoder(t)


def nt_xent(zi, zt, temperature=0.1):
    logits = zi @ zt.t() / temperature
    labels = torch.arange(len(zi))
    return 0.75 * F.cross_entropy(logits, labels) + 0.25 * F.cross_entropy(logits.t(), labels)


def pairs(n, to_img, to_txt):
    latent = torch.randn(n, 6)
    return (torch.tanh(latent @ to_img) + 0.1 * torch.randn(n, 24),
            torch.tanh(latent @ to_txt) + 0.1 * torch.randn(n, 20))


def main():
    to_img, to_txt = torch.randn(6, 24), torch.randn(6, 20)
    model = PairModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(30):
        x, t = pairs(48, to_img, to_txt)
        loss = nt_xent(*model(x, t))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == 29:
            print(f"step {step:2d} loss {loss.item():.4f}")


main()
