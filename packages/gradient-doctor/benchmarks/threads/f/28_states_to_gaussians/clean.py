import torch
from torch import nn


def feedforward(layers, dropout=None, activation=nn.ReLU):
    parts = []
    for k, (i, o) in enumerate(zip(layers[:-1], layers[1:])):
        parts.append(nn.Linear(i, o))
        if k < len(layers) - 2:
            parts.append(activation())
            if dropout is not None:
                parts.append(nn.Dropout(p=dropout))
    return nn.Sequential(*parts)


def tda_loss(s, labels, centers, sigmas, alpha=1.0, beta=1.0):
    """Every metastable state shall be a Gaussian of given centre and width in the variable s."""
    loss = 0.0
    for k in range(len(centers)):
        s_k = s[labels == k]
        loss = loss + alpha * (s_k.mean() - centers[k]).pow(2) + beta * (s_k.std() - sigmas[k]).pow(2)
    return loss


class DeepTDA(nn.Module):
    def __init__(self, layers, centers, sigmas, options=None):
        super().__init__()
        options = options or {}
        self.norm_in = nn.LayerNorm(layers[0], elementwise_affine=False)
        self.nn = feedforward(layers, **options)
        self.centers, self.sigmas = centers, sigmas

    def forward(self, x):
        return self.nn(self.norm_in(x)).squeeze(-1)

    def training_step(self, batch):
        x, labels = batch
        return tda_loss(self(x), labels, self.centers, self.sigmas)


def descriptors(n):
    labels = torch.randint(0, 3, (n,))
    angle = labels * 2.1 + 0.3 * torch.randn(n)
    base = torch.stack([angle.sin(), angle.cos(), (2 * angle).sin(), (2 * angle).cos()], 1)
    return torch.cat([base, 0.5 * torch.randn(n, 4)], 1), labels


if __name__ == "__main__":
    torch.manual_seed(42)
    model = DeepTDA([8, 32, 24, 1], centers=[-7.0, 0.0, 7.0], sigmas=[0.5, 0.5, 0.5], options={"dropout": 0.1})
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for it in range(300):
        model.train()
        loss = model.training_step(descriptors(200))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 50 == 49:
            model.eval()
            x, labels = descriptors(600)
            with torch.no_grad():
                means = [model(x[labels == k]).mean().item() for k in range(3)]
            print(f"{it + 1} loss {loss.item():.3f} centres", " ".join(f"{m:+.2f}" for m in means))
