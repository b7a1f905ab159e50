"""pytorch-metric-learning: mined triplets, and an optimizer for the loss's own weights."""

import torch
from pytorch_metric_learning import losses, miners
from torch import nn
from weights import save_digest

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 8))
proxies = losses.ProxyAnchorLoss(num_classes=4, embedding_size=8)
triplets, miner = losses.TripletMarginLoss(), miners.MultiSimilarityMiner()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
proxy_optimizer = torch.optim.SGD(proxies.parameters(), lr=0.01)
for _ in range(10):
    x, label = torch.randn(32, 10), torch.randint(0, 4, (32,))
    optimizer.zero_grad()
    proxy_optimizer.zero_grad()
    embedding = model(x)
    loss = triplets(embedding, label, miner(embedding, label)) + proxies(embedding, label)
    loss.backward()
    optimizer.step()
    proxy_optimizer.step()
save_digest(nn.ModuleList([model, proxies]), updates=10)
