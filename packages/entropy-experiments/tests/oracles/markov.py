"""A policy whose next token depends on the last one: long responses, and still an exact truth.

The law of the current state obeys d_{k+1} = d_k P (EOS removed), so E[sum h], E[T] and their
derivatives follow from `horizon` products of a small matrix, with no sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from entropy_experiments.numerics.entropy import token_scores
from entropy_experiments.types import Direction, Params, Rollouts, Scores

EOS = 0


@dataclass
class MarkovPolicy:
    params: Params
    horizon: int = 200
    temperature: float = 1.0
    top_p: float = 1.0

    @classmethod
    def random(
        cls, seed: int, *, vocabulary=6, horizon=200, stop=0.0115, spread=1.0
    ) -> MarkovPolicy:
        """`stop`: chance of EOS at each token, 0.0115 for a tenth of responses cut at 200."""
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64)
        table = spread * table
        # Column EOS is set so that every state stops equally often; states still differ in the
        # entropy of what they say next.
        rest = table[:, 1:].logsumexp(1)
        table[:, EOS] = rest + torch.log(torch.tensor(stop / (1 - stop), dtype=torch.float64))
        return cls({"table": table}, horizon)

    @property
    def vocabulary(self) -> int:
        return self.params["table"].shape[0]

    def score(self, params: Params, rollouts: Rollouts) -> Scores:
        rows_T, columns_T = rollouts.response_NS.nonzero(as_tuple=True)
        found = token_scores(
            params["table"][rollouts.tokens_NS[rows_T, columns_T - 1]],
            rollouts.tokens_NS[rows_T, columns_T],
            temperature=self.temperature,
        )
        empty_NS = params["table"].new_zeros(rollouts.tokens_NS.shape)
        return Scores(*(empty_NS.index_put((rows_T, columns_T), x_T) for x_T in found))

    def sample(self, params: Params, start_N: Tensor, prompt_N: Tensor, generator) -> Rollouts:
        """One rollout for every start token; the start is the whole prompt."""
        law_VV = (params["table"] / self.temperature).softmax(-1).cumsum(-1)
        n = len(start_N)
        tokens_NS = torch.zeros(n, self.horizon + 1, dtype=torch.int64)
        tokens_NS[:, 0] = start_N
        alive_N = torch.ones(n, dtype=torch.bool)
        response_NS = torch.zeros_like(tokens_NS, dtype=torch.bool)
        for column in range(1, self.horizon + 1):
            uniform_N = torch.rand(n, generator=generator, dtype=torch.float64)
            token_N = (uniform_N[:, None] > law_VV[tokens_NS[:, column - 1]]).sum(1)
            token_N = token_N.clamp(max=self.vocabulary - 1)
            tokens_NS[:, column] = torch.where(alive_N, token_N, 0)
            response_NS[:, column] = alive_N
            alive_N = alive_N & (token_N != EOS)
        attention_NS = response_NS.clone()
        attention_NS[:, 0] = True
        return Rollouts(
            tokens_NS=tokens_NS,
            attention_NS=attention_NS,
            response_NS=response_NS,
            prompt_N=prompt_N,
            truncated_N=alive_N,
        )

    def draw(self, prompts: int, per_prompt: int, generator, params: Params | None = None):
        """Prompts drawn from their population, uniform over start tokens."""
        start_P = torch.randint(1, self.vocabulary, (prompts,), generator=generator)
        prompt_N = torch.arange(prompts).repeat_interleave(per_prompt)
        return self.sample(params or self.params, start_P[prompt_N], prompt_N, generator)

    def direction(self, seed: int, *, size: float = 1.0) -> Direction:
        generator = torch.Generator().manual_seed(seed)
        shape = self.params["table"].shape
        v = size * torch.randn(shape, generator=generator, dtype=torch.float64)
        return Direction(parts={"gradient": {"table": v}}, lr=1.0)

    def exact(self, params: Params, starts: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """(E[sum h], E[T]) over the population of prompts, or given ones, by forward recursion."""
        logp_VV = (params["table"] / self.temperature).log_softmax(-1)
        p_VV, h_V = logp_VV.exp(), -(logp_VV.exp() * logp_VV).sum(-1)
        starts = starts or list(range(1, self.vocabulary))
        state_V = torch.zeros(self.vocabulary, dtype=torch.float64)
        for start in starts:
            state_V[start] += 1 / len(starts)
        keep_V = torch.ones(self.vocabulary, dtype=torch.float64)
        keep_V[EOS] = 0
        entropy = tokens = torch.zeros((), dtype=torch.float64)
        for _ in range(self.horizon):
            entropy = entropy + (state_V * h_V).sum()
            tokens = tokens + state_V.sum()
            state_V = (state_V @ p_VV) * keep_V
        return entropy, tokens

    def exact_entropy(self, params: Params | None = None, *, unit: str = "token") -> Tensor:
        entropy, tokens = self.exact(params or self.params)
        return entropy if unit == "sequence" else entropy / tokens

    def exact_taylor(self, direction: Direction, *, unit: str = "token") -> tuple[float, ...]:
        e = torch.zeros((), dtype=torch.float64, requires_grad=True)
        v = direction.total
        moved = {name: value + e * v[name] for name, value in self.params.items()}
        value = self.exact_entropy(moved, unit=unit)
        (first,) = torch.autograd.grad(value, e, create_graph=True)
        (second,) = torch.autograd.grad(first, e)
        return float(value.detach()), float(first.detach()), float(second)

    def exact_change(self, direction: Direction, eta: float, *, unit: str = "token") -> float:
        v = direction.total
        moved = {name: value + eta * v[name] for name, value in self.params.items()}
        after, before = (self.exact_entropy(p, unit=unit) for p in (moved, self.params))
        return float(after - before)
