import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class SupConLoss(nn.Module):
    def __init__(self, temperature=0.2):
        super().__init__()
        self.temperature = temperature

    def forward(self, features, labels):
        n_views = features.shape[1]
        feats = torch.cat(torch.unbind(features, dim=1), dim=0)
        labels = labels.repeat(n_views).view(-1, 1)
        mask = torch.eq(labels, labels.T).float()
        logits = feats @ feats.T / self.temperature
        logits = logits - logits.max(dim=1, keepdim=True).values.detach()
        others = 1 - torch.eye(mask.shape[0])
        mask = mask * others
        exp_logits = torch.exp(logits) * others
        log_prob = logits - torch.log(exp_logits.sum(1, keepdim=True))
        mean_log_prob_pos = (mask * log_prob).sum(1) / mask.sum(1).clamp(min=1)
        return -mean_log_prob_pos.mean()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        return F.normalize(self.body(x), dim=1)


prototypes = torch.randn(6, 8)
encoder, criterion = Encoder(), SupConLoss()
optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
for step in range(120):
    y = torch.randint(0, 6, (16,))
    x = prototypes[y] + 0.5 * torch.randn(16, 8)
    z = encoder(x)
    loss = criterion(z.unsqueeze(1), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(f"step {step + 1}: loss {loss.item():.4f}")
