import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(25)
TEXT = ("the cat sat on the mat and the dog sat on the log while "
        "the bird sang to the cat and the frog sat in the bog ") * 6
CHARS = sorted(set(TEXT))
IDS = torch.tensor([CHARS.index(c) for c in TEXT])
BLOCK, BATCH = 16, 8


class CharModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.tok = nn.Embedding(len(CHARS), dim)
        self.conv = nn.Conv1d(dim, 64, kernel_size=4)
        self.head = nn.Linear(64, len(CHARS))

    def forward(self, idx, targets):
        x = F.pad(self.tok(idx).transpose(1, 2), (3, 0))
        x = F.gelu(self.conv(x)).transpose(1, 2)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch():
    start = torch.randint(0, len(IDS) - BLOCK - 1, (BATCH,))
    x = torch.stack([IDS[s:s + BLOCK] for s in start])
    y = torch.stack([IDS[s + 1:s + BLOCK + 1] for s in start])
    return x, y


gradient_accumulation_steps = 16
model = CharModel()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

for iter_num in range(101):
    for micro_step in range(gradient_accumulation_steps):
        X, Y = get_batch()
        loss = model(X, Y)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % 10 == 0:
        with torch.no_grad():
            print(f"iter {iter_num}: loss {model(*get_batch()).item():.4f}")
