import torch
import torch.nn as nn

FEATURE_DIM = 16


class ABMIL(nn.Module):
    """Gated attention pooling of the patches of one slide."""

    def __init__(self, input_feature_dim=FEATURE_DIM, head_dim=24):
        super().__init__()
        self.pre = nn.Sequential(nn.Linear(input_feature_dim, head_dim), nn.GELU())
        self.tanh, self.gate = nn.Linear(head_dim, 12), nn.Linear(head_dim, 12)
        self.score = nn.Linear(12, 1)

    def forward(self, bag):
        h = self.pre(bag)
        a = self.score(torch.tanh(self.tanh(h)) * torch.sigmoid(self.gate(h))).softmax(dim=-2)
        return (a * h).sum(-2)


class SlideEncoder(nn.Module):
    """Common wrapper for ready-made slide encoders: builds, loads if there is a file, freezes."""

    def __init__(self, freeze=True, weights=None, **build_kwargs):
        super().__init__()
        self.model = self.build(**build_kwargs)
        if weights is not None:
            self.model.load_state_dict(torch.load(weights))
        if freeze:
            for p in self.model.parameters():
                p.requires_grad = False

    def forward(self, bag):
        return self.model(bag)


class ABMILSlideEncoder(SlideEncoder):
    def build(self, **kw):
        return ABMIL(**kw)


class BinaryClassificationModel(nn.Module):
    def __init__(self, hidden_dim=24):
        super().__init__()
        self.feature_encoder = ABMILSlideEncoder(freeze=False, input_feature_dim=FEATURE_DIM, head_dim=24)
        self.classifier = nn.Sequential(nn.Linear(24, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 1))

    def forward(self, bag):
        return self.classifier(self.feature_encoder(bag)).squeeze(-1)


def bags(n, tumour, patches=40):
    """A slide is positive if two of its patches look like tumour."""
    y = torch.randint(0, 2, (n,)).float()
    x = torch.randn(n, patches, FEATURE_DIM)
    x[:, :2] += y[:, None, None] * tumour
    return x, y


torch.manual_seed(7)
tumour = 2.5 * torch.nn.functional.normalize(torch.randn(FEATURE_DIM), dim=0) * 1.6
model = BinaryClassificationModel()
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
num_epochs = 8
for epoch in range(num_epochs):
    model.train()
    total_loss = 0.0
    for _ in range(25):
        features, labels = bags(32, tumour)
        optimizer.zero_grad()
        loss = criterion(model(features), labels)
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
    features, labels = bags(400, tumour)
    acc = ((model(features) > 0).float() == labels).float().mean().item()
    print(f"Epoch {epoch + 1}/{num_epochs}, Loss: {total_loss / 25:.4f}, accuracy {acc:.3f}")
