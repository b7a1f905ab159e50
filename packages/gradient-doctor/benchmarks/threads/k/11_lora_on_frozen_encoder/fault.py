import math
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(11)


class LoRALinear(nn.Linear):
    def __init__(self, n_in, n_out, r=4, alpha=8):
        super().__init__(n_in, n_out)
        self.lora_A = nn.Parameter(torch.empty(r, n_in))
        self.lora_B = nn.Parameter(torch.zeros(n_out, r))
        self.scaling = alpha / r
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        return super().forward(x) + (x @ self.lora_A.t() @ self.lora_B.t()) * self.scaling


class Encoder(nn.Module):
    def __init__(self, vocab=40, dim=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.q = LoRALinear(dim, dim)
        self.v = LoRALinear(dim, dim)
        self.k = nn.Linear(dim, dim)

    def forward(self, ids):
        x = self.embed(ids)
        att = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2) / math.sqrt(x.size(-1)), dim=-1)
        return torch.tanh(att @ self.v(x)).mean(dim=1)


def mark_only_lora_as_trainable(model):
    for name, p in model.named_parameters():
        if "lora_" not in name:
            p.requires_grad = False


def load_backbone():
    encoder = Encoder()
    for p in encoder.parameters():
        p.requires_grad = False
    return encoder


encoder = load_backbone()
mark_only_lora_as_trainable(encoder)
head = nn.Linear(24, 2)
trainable = [p for p in [*encoder.parameters(), *head.parameters()] if p.requires_grad]
print("tensors to train:", len(trainable))
optimizer = torch.optim.AdamW(trainable, lr=1e-2)

ids = torch.randint(0, 40, (256, 8))
labels = ((ids == 3) | (ids == 17) | (ids == 29)).any(dim=1).long()
for step in range(121):
    loss = F.cross_entropy(head(encoder(ids)), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")
