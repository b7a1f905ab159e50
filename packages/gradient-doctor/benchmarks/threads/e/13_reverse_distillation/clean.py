import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
CATEGORIES = ["bottle", "cable", "carpet", "zipper"]
accumulation_steps = len(CATEGORIES)

teacher = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 32)).eval()
for p in teacher.parameters():
    p.requires_grad_(False)
proj_layer = nn.Sequential(nn.Linear(32, 16), nn.Tanh())
decoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))

optimizer_proj = torch.optim.Adam(proj_layer.parameters(), lr=4e-3)
optimizer_distill = torch.optim.Adam(decoder.parameters(), lr=4e-3)

basis = torch.randn(4, 3, 24)
offset = 1.5 * torch.randn(4, 24)


def normal_samples(category, n=32):
    k = CATEGORIES.index(category)
    return offset[k] + torch.randn(n, 3) @ basis[k]


def distance(feat, rec):
    return (1 - F.cosine_similarity(feat, rec, dim=1)).mean()


for epoch in range(1, 9):
    per_category = dict.fromkeys(CATEGORIES, 0.0)
    for i in range(20 * accumulation_steps):
        name = CATEGORIES[i % accumulation_steps]
        with torch.no_grad():
            feat = teacher(normal_samples(name))
        rec = decoder(proj_layer(feat))
        loss = distance(feat, rec)
        per_category[name] += loss.item() / 20

        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer_proj.step()
            optimizer_distill.step()
            optimizer_proj.zero_grad()
            optimizer_distill.zero_grad()
    print(f"epoch {epoch} " + " ".join(f"{k} {v:.3f}" for k, v in per_category.items()))
