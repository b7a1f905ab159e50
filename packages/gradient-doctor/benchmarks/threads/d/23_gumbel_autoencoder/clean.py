import torch
import torch.nn.functional as F
from torch import nn, optim

torch.manual_seed(0)

latent_dim = 6
categorical_dim = 5  # one-of-K vector
eps = 1e-20


def gumbel_softmax(logits, temperature):
    noise = -torch.log(-torch.log(torch.rand_like(logits) + eps) + eps)
    return F.softmax((logits + noise) / temperature, dim=-1)


class VAE_gumbel(nn.Module):
    def __init__(self, pixels=36):
        super().__init__()
        self.fc1 = nn.Linear(pixels, 64)
        self.fc2 = nn.Linear(64, latent_dim * categorical_dim)
        self.fc3 = nn.Linear(latent_dim * categorical_dim, 64)
        self.fc4 = nn.Linear(64, pixels)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x, temp):
        q_y = self.fc2(F.relu(self.fc1(x))).view(len(x), latent_dim, categorical_dim)
        z = gumbel_softmax(q_y, temp)
        return self.decode(z.flatten(1)), F.softmax(q_y, dim=-1)


def divergence(qy):
    log_qy = torch.log(qy + eps)
    g = torch.log(torch.tensor(1.0 / categorical_dim))
    return qy * (log_qy - g)


def loss_function(recon_x, x, qy):
    BCE = F.binary_cross_entropy(recon_x, x, reduction="sum") / x.shape[0]
    KLD = torch.sum(divergence(qy)) / x.shape[0]
    return BCE + KLD


def digits(n=64):
    """Bars: some rows and columns of a 6 x 6 picture are lit."""
    rows, cols = torch.rand(n, 6, 1) < 0.25, torch.rand(n, 1, 6) < 0.25
    return (rows | cols).float().flatten(1)


model = VAE_gumbel()
optimizer = optim.Adam(model.parameters(), lr=2e-3)
temp = 1.0
for epoch in range(1, 9):
    model.train()
    train_loss, bound = 0.0, 0.0
    for batch_idx in range(60):
        data = digits()
        optimizer.zero_grad()
        recon_batch, qy = model(data, temp)
        loss = loss_function(recon_batch, data, qy)
        loss.backward()
        optimizer.step()
        train_loss += loss.item() / 60
        with torch.no_grad():
            nll = F.binary_cross_entropy(recon_batch, data, reduction="sum") / len(data)
            bound += (nll + divergence(qy).sum() / len(data)).item() / 60
    temp = max(temp * 0.95, 0.5)
    print(f"====> Epoch: {epoch} Average loss: {train_loss:.3f}  negative ELBO: {bound:.3f}")
