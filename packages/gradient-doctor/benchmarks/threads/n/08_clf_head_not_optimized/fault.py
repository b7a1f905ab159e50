import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
VOCAB, LENGTH, DIM = 40, 16, 32


class TransformerModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.position = nn.Parameter(torch.randn(LENGTH, DIM) * 0.02)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.h = nn.TransformerEncoderLayer(DIM, 4, 64, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.h(self.embed(x) + self.position)


class LMHead(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.decoder = nn.Linear(DIM, VOCAB, bias=False)
        self.decoder.weight = model.embed.weight

    def forward(self, h):
        return self.decoder(h[:, :-1])


class ClfHead(nn.Module):
    def __init__(self, n_class):
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.linear = nn.Linear(DIM, n_class)
        nn.init.normal_(self.linear.weight, std=0.02)
        nn.init.zeros_(self.linear.bias)

    def forward(self, h):
        return self.linear(self.dropout(h[:, -1]))


def make_batch(n=32):
    x = torch.randint(0, VOCAB, (n, LENGTH))
    y = (x[:, -1] + (x[:, -2] > 19).long()) % 4
    return x, y


model = TransformerModel()
lm_head, clf_head = LMHead(model), ClfHead(4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
lm_coef = 0.1

for step in range(301):
    x, y = make_batch()
    h = model(x)
    clf_loss = F.cross_entropy(clf_head(h), y)
    lm_loss = F.cross_entropy(lm_head(h).transpose(1, 2), x[:, 1:])
    optimizer.zero_grad()
    (clf_loss + lm_coef * lm_loss).backward()
    optimizer.step()
    if step % 100 == 0:
        w = clf_head.linear.weight
        print(f"step {step:3d}  clf {clf_loss.item():.3f}  lm {lm_loss.item():.3f}  |w_clf| {w.norm().item():.4f}")
