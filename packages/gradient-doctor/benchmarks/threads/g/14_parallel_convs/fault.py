import torch
import torch.nn as nn

torch.manual_seed(8)


class MergeBranches(nn.Module):
    """Runs several layers side by side and joins what they give."""

    def __init__(self, branches):
        super().__init__()
        self.branches = list(branches)

    def forward(self, x):
        return torch.cat([b(x).relu().amax(dim=2) for b in self.branches], dim=1)


class TextCNN(nn.Module):
    def __init__(self, vocab=30, emb=8, filters=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, emb)
        self.emb.weight.requires_grad_(False)      # fixed word vectors
        self.convs = MergeBranches(nn.Conv1d(emb, filters, k, padding=k // 2) for k in (1, 3))
        self.out = nn.Linear(2 * filters, 2)

    def forward(self, tokens):
        x = self.emb(tokens).transpose(1, 2)
        return self.out(self.convs(x))


# label: does the word 3 stand directly before the word 7?
tokens = torch.randint(0, 30, (600, 12))
label = torch.zeros(600, dtype=torch.long)
label[:300] = 1
spot = torch.randint(0, 11, (300,))
tokens[torch.arange(300), spot] = 3
tokens[torch.arange(300), spot + 1] = 7

model = TextCNN()
first = model.convs.branches[1].weight.detach().clone()
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
loss_fn = nn.CrossEntropyLoss()

for epoch in range(30):
    for i in torch.randperm(600).split(60):
        optimizer.zero_grad()
        loss = loss_fn(model(tokens[i]), label[i])
        loss.backward()
        optimizer.step()
    if epoch % 6 == 0 or epoch == 29:
        moved = (model.convs.branches[1].weight - first).abs().max().item()
        print(f"epoch {epoch:2d}  loss {loss.item():.4f}  conv moved {moved:.4f}")
