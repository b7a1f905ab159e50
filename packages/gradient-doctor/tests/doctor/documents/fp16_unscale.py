"""Document 003, issue 3: a language model loaded in fp16 and a GradScaler."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class QwenCfg:
    width: int = 16
    dtype: str = "float16"


class Qwen(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.lm = nn.Sequential(nn.Linear(15, cfg.width), nn.Tanh(), nn.Linear(cfg.width, 8))
        self.lm.to(getattr(torch, cfg.dtype))  # FAULT

    def forward(self, features):
        return self.lm(features.to(self.lm[0].weight.dtype)).float()


def main():
    torch.manual_seed(0)
    qwen, agent = Qwen(QwenCfg()), nn.Linear(8, 10)
    optimizer = torch.optim.AdamW([*qwen.parameters(), *agent.parameters()], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for _ in range(4):
        features, colour = torch.randn(6, 15), torch.randint(0, 10, (6,))
        loss = F.cross_entropy(agent(qwen(features)), colour)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


if __name__ == "__main__":
    main()
