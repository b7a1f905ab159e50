"""A policy with a free row of logits for every prefix: nothing is shared between states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from entropy_experiments.numerics.entropy import nucleus_fingerprint, token_scores
from entropy_experiments.types import Params, Rollouts, Scores


@dataclass
class TabularPolicy:
    params: Params
    vocabulary: int
    horizon: int
    prompts: int
    temperature: float = 1.0
    top_p: float = 1.0
    chunk: int | None = None

    @classmethod
    def random(cls, seed: int, *, vocabulary=3, horizon=4, prompts=2, **options) -> TabularPolicy:
        generator = torch.Generator().manual_seed(seed)
        nodes = sum(vocabulary**depth for depth in range(horizon))
        shape = (prompts * nodes, vocabulary)
        table = torch.randn(shape, generator=generator, dtype=torch.float64)
        return cls({"table": table}, vocabulary, horizon, prompts, **options)

    def prompt_tokens(self, prompt: int) -> list[int]:
        # Prompts of different lengths, so that padding is always in play.
        return [self.vocabulary + prompt] * (1 + 2 * prompt)

    def states(self, tokens_NS: Tensor, attention_NS: Tensor) -> Tensor:
        """[N, S]: the table row that predicts token s + 1."""
        v, nodes = self.vocabulary, sum(self.vocabulary**d for d in range(self.horizon))
        n, s = tokens_NS.shape
        node_N = torch.zeros(n, dtype=torch.int64)
        prompt_N = torch.zeros(n, dtype=torch.int64)
        out_NS = torch.zeros(n, s, dtype=torch.int64)
        for column in range(s):
            token_N, real_N = tokens_NS[:, column], attention_NS[:, column]
            is_prompt_N = real_N & (token_N >= v)
            prompt_N = torch.where(is_prompt_N, token_N - v, prompt_N)
            node_N = torch.where(real_N & (token_N < v), node_N * v + 1 + token_N, node_N)
            out_NS[:, column] = prompt_N * nodes + node_N.clamp(max=nodes - 1)
        return out_NS

    def logits(self, params: Params, tokens_NS: Tensor, attention_NS: Tensor) -> Tensor:
        return params["table"][self.states(tokens_NS, attention_NS)]

    def _response_logits(self, params: Params, rollouts: Rollouts) -> tuple[Tensor, ...]:
        states_NS = self.states(rollouts.tokens_NS, rollouts.attention_NS)
        rows_T, columns_T = rollouts.response_NS.nonzero(as_tuple=True)
        return params["table"][states_NS[rows_T, columns_T - 1]], rows_T, columns_T

    def score(self, params: Params, rollouts: Rollouts) -> Scores:
        logits_TV, rows_T, columns_T = self._response_logits(params, rollouts)
        found = token_scores(
            logits_TV,
            rollouts.tokens_NS[rows_T, columns_T],
            temperature=self.temperature,
            top_p=self.top_p,
            chunk=self.chunk,
        )
        empty_NS = logits_TV.new_zeros(rollouts.tokens_NS.shape)
        return Scores(*(empty_NS.index_put((rows_T, columns_T), x_T) for x_T in found))

    def support(self, params: Params, rollouts: Rollouts) -> Tensor:
        logits_TV, rows_T, columns_T = self._response_logits(params, rollouts)
        found_T = nucleus_fingerprint(logits_TV, temperature=self.temperature, top_p=self.top_p)
        return torch.zeros_like(rollouts.tokens_NS).index_put((rows_T, columns_T), found_T)
