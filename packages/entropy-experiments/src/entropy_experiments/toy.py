"""A policy small enough to read: what the examples of the API reference run on.

    policy = BigramPolicy()
    evaluation, batch = policy.draw(seed=2), policy.update_batch(seed=1)

`p(token | token before it)` is a row of a table of logits, so everything takes milliseconds and
every number can be checked by hand. It has what the estimators ask of a policy, nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from entropy_experiments.types import Rollouts, Scores, UpdateBatch

VOCABULARY, LENGTH = 5, 4
PROMPTS, GROUP = 8, 4


class BigramPolicy:
    """One row of logits for each token; a `Policy` in float64."""

    def __init__(self, *, temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        table_VV = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64)
        self.params: Mapping[str, Tensor] = {"table": table_VV.requires_grad_()}
        self.temperature, self.top_p = temperature, top_p

    def score(self, params: Mapping[str, Tensor], rollouts: Rollouts) -> Scores:
        """Log-prob of each drawn token, and the entropy of the distribution it was drawn from."""
        tokens_NS = rollouts.tokens_NS
        logits_NSV = params["table"][tokens_NS[:, :-1]] / self.temperature
        logp_NSV = logits_NSV.log_softmax(-1)
        drawn_NS = logp_NSV.gather(2, tokens_NS[:, 1:, None]).squeeze(2)
        entropy_NS = -(logp_NSV.exp() * logp_NSV).sum(2)
        # Nothing predicts the first token, which is the prompt.
        both = (pad(x_NS, (1, 0)) for x_NS in (drawn_NS, entropy_NS))
        return Scores(*(torch.where(rollouts.response_NS, x_NS, 0.0) for x_NS in both))

    @torch.no_grad()
    def draw(
        self, *, seed: int, prompts: int = PROMPTS, params: Mapping[str, Tensor] | None = None
    ) -> Rollouts:
        """GROUP responses to each prompt; prompt i is the single token i % VOCABULARY."""
        generator = torch.Generator().manual_seed(seed)
        table_VV = (params or self.params)["table"] / self.temperature
        prompt_N = torch.arange(prompts).repeat_interleave(GROUP)
        columns = [prompt_N % VOCABULARY]
        for _ in range(LENGTH):
            probability_NV = table_VV[columns[-1]].softmax(-1)
            columns.append(torch.multinomial(probability_NV, 1, generator=generator).squeeze(1))
        tokens_NS = torch.stack(columns, 1)
        response_NS = torch.ones_like(tokens_NS, dtype=torch.bool)
        response_NS[:, 0] = False
        return Rollouts(
            tokens_NS=tokens_NS,
            attention_NS=torch.ones_like(response_NS),
            response_NS=response_NS,
            prompt_N=prompt_N,
        )

    def update_batch(self, *, seed: int) -> UpdateBatch:
        """Rollouts rewarded for every "2", relative to their group."""
        rollouts = self.draw(seed=seed)
        reward_N = ((rollouts.tokens_NS == 2) & rollouts.response_NS).double().sum(1)
        reward_PG = reward_N.view(-1, GROUP)
        advantage_N = (reward_PG - reward_PG.mean(1, keepdim=True)).flatten()
        advantage_NS = advantage_N[:, None].expand(rollouts.tokens_NS.shape)
        return UpdateBatch(rollouts=rollouts, advantage_NS=advantage_NS, reward_N=reward_N)
