import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

rng = np.random.default_rng(7)
torch.manual_seed(7)

# ---- data: prices, a few of them absurd
n_train, n_features = 1024, 8
X = rng.normal(size=(n_train, n_features)).astype(np.float32)
w = rng.normal(size=n_features).astype(np.float32)
y = X @ w + 0.1 * rng.normal(size=n_train).astype(np.float32)
giants = rng.choice(n_train, size=6, replace=False)
y[giants] += 400.0
data = {"train": (torch.from_numpy(X[:900]), torch.from_numpy(y[:900])),
        "test": (torch.from_numpy(X[900:]), torch.from_numpy(X[900:] @ w))}

# ---- model: an ensemble of k small networks, averaged for the prediction
k, hidden = 4, 32


class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(k, n_features, hidden) / n_features ** 0.5)
        self.b1 = nn.Parameter(torch.zeros(k, 1, hidden))
        self.w2 = nn.Parameter(torch.randn(k, hidden, 1) / hidden ** 0.5)

    def forward(self, x):
        h = torch.relu(torch.baddbmm(self.b1, x.expand(k, *x.shape), self.w1))
        return torch.bmm(h, self.w2).squeeze(-1)  # k, batch


model = Ensemble()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
gradient_clipping_norm = 1.0


@torch.inference_mode()
def evaluate(part):
    x, target = data[part]
    return F.mse_loss(model(x).mean(0), target).sqrt().item()


x_train, y_train = data["train"]
for epoch in range(8):
    model.train()
    for idx in torch.randperm(len(x_train)).split(32):
        optimizer.zero_grad()
        out = model(x_train[idx])
        loss = F.mse_loss(out, y_train[idx].expand_as(out))
        loss.backward()
        if gradient_clipping_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clipping_norm)
        optimizer.step()
    model.eval()
    print(f"epoch {epoch} test rmse {evaluate('test'):.3f} (spread of the target {data['test'][1].std():.3f})")
