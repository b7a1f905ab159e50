"""A two-layer transformer of our own: true fp64, which transformers' models are not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from entropy_experiments.numerics.entropy import response_scores, response_support
from entropy_experiments.types import Params, Rollouts, Scores


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x_NSD: Tensor, visible_NSS: Tensor) -> Tensor:
        n, s, d = x_NSD.shape
        qkv = self.qkv(self.norm1(x_NSD)).view(n, s, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / (d // self.heads) ** 0.5
        scores = scores.masked_fill(~visible_NSS[:, None], -1e30)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, s, d)
        x_NSD = x_NSD + self.out(mixed)
        return x_NSD + self.down(torch.tanh(self.up(self.norm2(x_NSD))))


class Backbone(nn.Module):
    def __init__(self, vocabulary: int, prompts: int, length: int, width: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary + prompts, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=True)

    def forward(self, tokens_NS: Tensor, attention_NS: Tensor) -> Tensor:
        position_NS = (attention_NS.cumsum(1) - 1).clamp(min=0)
        x_NSD = self.embed(tokens_NS) + self.position(position_NS)
        s = tokens_NS.shape[1]
        causal_SS = torch.ones(s, s, dtype=torch.bool).tril()
        visible_NSS = causal_SS & attention_NS[:, None, :]
        for block in self.blocks:
            x_NSD = block(x_NSD, visible_NSS)
        return self.norm(x_NSD)


class TransformerPolicy:
    def __init__(
        self,
        seed: int,
        *,
        vocabulary: int = 3,
        horizon: int = 4,
        prompts: int = 2,
        width: int = 8,
        temperature: float = 1.0,
        top_p: float = 1.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.vocabulary, self.horizon, self.prompts = vocabulary, horizon, prompts
        self.temperature, self.top_p, self.chunk = temperature, top_p, None
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = Backbone(vocabulary, prompts, horizon + 2 * prompts, width, 2).double()
            for parameter in self.model.parameters():
                # Larger than the default initialisation: laws far from uniform, real attention.
                nn.init.normal_(parameter, std=0.5)
        self.model.to(dtype).requires_grad_(False)
        self.params: Params = dict(self.model.named_parameters())

    def prompt_tokens(self, prompt: int) -> list[int]:
        return [self.vocabulary + prompt] * (1 + 2 * prompt)

    def _hidden(self, params: Params, tokens_NS: Tensor, attention_NS: Tensor) -> Tensor:
        return functional_call(self.model, dict(params), (tokens_NS, attention_NS))

    def logits(self, params: Params, tokens_NS: Tensor, attention_NS: Tensor) -> Tensor:
        hidden_NSD = self._hidden(params, tokens_NS, attention_NS)
        return hidden_NSD @ params["head.weight"].T + params["head.bias"]

    def score(self, params: Params, rollouts: Rollouts) -> Scores:
        return response_scores(
            self._hidden(params, rollouts.tokens_NS, rollouts.attention_NS),
            params["head.weight"],
            rollouts,
            bias_V=params["head.bias"],
            temperature=self.temperature,
            top_p=self.top_p,
            chunk=self.chunk,
        )

    def support(self, params: Params, rollouts: Rollouts) -> Tensor:
        return response_support(
            self._hidden(params, rollouts.tokens_NS, rollouts.attention_NS),
            params["head.weight"],
            rollouts,
            bias_V=params["head.bias"],
            temperature=self.temperature,
            top_p=self.top_p,
        )
