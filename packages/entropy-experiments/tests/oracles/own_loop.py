"""A GRPO loop as people write it by hand, around a tiny model in fp64; our loss has no part in it.

Two optimizer steps for every batch, so that the ratio is not 1 in the second.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.models.precision import true_float64
from oracles.tiny_grpo import PROMPTS, reward
from oracles.tiny_models import EOS, PAD, tiny_model, tiny_tokenizer

CLIP, MAX_GRAD_NORM, LENGTH, GROUP, LR = 0.1, 0.5, 10, 4, 2e-3
FACTS: dict[str, Any] = {
    "loss": "grpo",
    "clip_low": CLIP,
    "clip_high": CLIP,
    "ratio": "token",
    "beta": 0.0,
    "entropy_coef": 0.0,
    "advantage": "group",
    "max_grad_norm": MAX_GRAD_NORM,
    "max_completion_length": LENGTH,
    "num_iterations": 2,
    "temperature": 1.0,
    "amp_dtype": "float32",
}

Step = Callable[[dict[str, Any]], AbstractContextManager[None]]


@dataclass
class Loop:
    model: Any
    optimizer: torch.optim.Optimizer
    tokenizer: Any
    generator: torch.Generator

    @staticmethod
    def begin(seed: int = 0) -> Loop:
        model = true_float64(tiny_model().double()).train()
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ]
        generator = torch.Generator().manual_seed(seed)
        return Loop(model, torch.optim.AdamW(groups, lr=LR), tiny_tokenizer(), generator)

    def draw(self) -> dict[str, Any]:
        """Responses to four prompts, with their log-probs and advantages."""
        rows = torch.randperm(len(PROMPTS), generator=self.generator)[:4].tolist()
        prompts = [PROMPTS[row] for row in rows for _ in range(GROUP)]
        encoded = self.tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
        ids, mask = encoded["input_ids"], encoded["attention_mask"]
        done = torch.zeros(len(ids), dtype=torch.bool)
        drawn = []
        with torch.no_grad():
            for _ in range(LENGTH):
                logits = self.model(input_ids=ids, attention_mask=mask).logits[:, -1]
                token = torch.multinomial(logits.softmax(-1), 1, generator=self.generator)
                token = torch.where(done[:, None], PAD, token)
                drawn.append(~done)
                ids = torch.cat([ids, token], 1)
                mask = torch.cat([mask, (~done)[:, None].long()], 1)
                done = done | (token[:, 0] == EOS)
        response = torch.stack(drawn, 1)
        texts = self.tokenizer.batch_decode(
            [row[keep] for row, keep in zip(ids[:, -LENGTH:], response, strict=True)]
        )
        rewards = torch.tensor(reward(texts), dtype=torch.float64)
        groups = rewards.view(-1, GROUP)
        centred = groups - groups.mean(1, keepdim=True)
        batch = {"input_ids": ids, "attention_mask": mask, "response_mask": response}
        with torch.no_grad():
            old = self.logprobs(batch)
        advantages = (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()
        return {**batch, "advantages": advantages, "old_logprobs": old, "rewards": rewards}

    def logprobs(self, batch: dict[str, Any]) -> Tensor:
        ids = batch["input_ids"]
        logits = self.model(input_ids=ids, attention_mask=batch["attention_mask"]).logits
        logps = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        return logps[:, -LENGTH:]

    def loss(self, batch: dict[str, Any]) -> Tensor:
        ratio = (self.logprobs(batch) - batch["old_logprobs"]).exp()
        advantages = batch["advantages"][:, None]
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        token_loss = -torch.min(ratio * advantages, clipped * advantages)
        mask = batch["response_mask"].double()
        return ((token_loss * mask).sum(1) / mask.sum(1)).mean()

    def run(
        self,
        steps: int,
        *,
        step: Step = lambda _: nullcontext(),
        after: Callable[[int], None] = lambda _: None,
    ) -> dict[str, Any]:
        """`steps` optimizer steps; `step` around each, `after` gets the number of steps made."""
        batch: dict[str, Any] = {}
        for made in range(steps):
            if made % 2 == 0:
                batch = self.draw()
            self.optimizer.zero_grad()
            self.loss(batch).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
            with step(batch):
                self.optimizer.step()
            after(made + 1)
        return self.outcome()

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")

    def outcome(self) -> dict[str, Any]:
        return {
            "weights": {n: p.detach().clone() for n, p in self.model.named_parameters()},
            "optimizer": self.optimizer.state_dict()["state"],
            "history": [],
            "rng": torch.cat([self.generator.get_state(), torch.random.get_rng_state()]),
        }
