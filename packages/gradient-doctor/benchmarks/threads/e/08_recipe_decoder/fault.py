import torch
import torch.nn as nn

torch.manual_seed(0)
VOCAB, START, MAXLEN = 14, 0, 6


class StepDecoder(nn.Module):
    """attends to the image features and emits one ingredient after another"""

    def __init__(self, vocab=VOCAB, dim=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.cell = nn.GRUCell(2 * dim, dim)
        self.linear = nn.Linear(dim, vocab)

    def forward(self, img_features, teacher=None):
        batch = img_features.size(0)
        state = img_features.mean(1)
        word = torch.full((batch,), START, dtype=torch.long)
        logits, sampled_ids = [], []
        for i in range(MAXLEN):
            scores = torch.bmm(img_features, state.unsqueeze(2)).softmax(1)
            context = (scores * img_features).sum(1)
            state = self.cell(torch.cat([self.embed(word), context], 1), state)
            outputs = self.linear(state)
            logits.append(outputs)
            word = outputs.max(1)[1] if teacher is None else teacher[:, i]
            sampled_ids.append(word)

        sampled_ids = torch.stack(sampled_ids, 1)
        logits = torch.stack(logits, 1).data
        return sampled_ids, logits


class InverseCooking(nn.Module):
    def __init__(self, pixels=20, dim=24):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, 48), nn.ReLU(), nn.Linear(48, dim))
        self.decoder = StepDecoder(dim=dim)
        self.crit = nn.CrossEntropyLoss()

    def forward(self, img, target):
        _, logits = self.decoder(self.encoder(img), teacher=target)
        return self.crit(logits.reshape(-1, VOCAB), target.reshape(-1))


dishes = torch.randint(1, VOCAB, (8, MAXLEN))
looks = torch.randn(8, 9, 20)


def load(n=32):
    idx = torch.randint(0, 8, (n,))
    return looks[idx] + 0.3 * torch.randn(n, 9, 20), dishes[idx]


model = InverseCooking()
optimizer = torch.optim.Adam([
    {"params": model.decoder.parameters(), "lr": 5e-3},
    {"params": model.encoder.parameters(), "lr": 2e-3},
])
for i in range(150):
    img, target = load()
    loss = model(img, target)
    model.zero_grad()
    loss.backward()
    optimizer.step()
    if i % 30 == 29:
        with torch.no_grad():
            ids, _ = model.decoder(model.encoder(img))
        print(f"step {i + 1} loss {loss.item():.3f} right {(ids == target).float().mean().item():.2f}")
