import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class LoraLinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scaling * (x @ self.lora_A.t() @ self.lora_B.t())


class CharLM(nn.Module):
    def __init__(self, vocab=24, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.up_proj = nn.Linear(2 * dim, 96)
        self.down_proj = nn.Linear(96, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = self.embed(ids)
        before = F.pad(h, (0, 0, 1, 0))[:, :-1]
        h = h + self.down_proj(F.gelu(self.up_proj(torch.cat([h, before], -1))))
        return self.lm_head(h)


def apply_lora(model):
    model.requires_grad_(False)
    for name in ("up_proj", "down_proj", "lm_head"):
        setattr(model, name, LoraLinear(getattr(model, name)))
    return model


class Trainer:
    def __init__(self, model, cfg):
        self.model, self.cfg = model, cfg
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=cfg["lr"])

    def batch(self):
        ids = torch.randint(0, 24, (self.cfg["batch_size"], 1))
        for _ in range(self.cfg["length"]):
            ids = torch.cat([ids, (ids[:, -1:] * 5 + 3) % 24], 1)
        return ids[:, :-1], ids[:, 1:]

    def training_step(self, batch):
        input_ids, labels = batch
        logits = self.model(input_ids)
        loss = F.cross_entropy(logits.transpose(1, 2), labels)
        loss.backward()
        return loss.detach()

    def optimizer_step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self):
        running = 0.0
        for step in range(1, self.cfg["max_steps"] + 1):
            loss = self.training_step(self.batch())
            self.optimizer_step()
            running += loss.item()
            if step % self.cfg["log_every"] == 0:
                print(f"step {step} train/loss {running / self.cfg['log_every']:.4f}")
                running = 0.0


Trainer(apply_lora(CharLM()), dict(lr=3e-3, batch_size=32, length=12, max_steps=400, log_every=80)).train()
