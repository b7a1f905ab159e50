"""A policy of your own, and five lines to an attribution.

    python examples/own_policy.py

To the estimators a policy is named parameters and the scores of given rollouts, nothing else. Here
it is a table of bigram logits, trained to say "2" by a group-relative reward.
"""

from __future__ import annotations

import torch

from entropy_experiments import Rollouts, Scores, StepOptions, UpdateBatch, analyze_step

VOCABULARY, LENGTH, PROMPTS, GROUP = 5, 6, 16, 8


class BigramPolicy:
    """p(token | token before it): one row of logits for each token."""

    temperature, top_p = 1.0, 1.0

    def __init__(self) -> None:
        table_VV = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.params = {"table": table_VV.requires_grad_()}

    def score(self, params, rollouts: Rollouts) -> Scores:
        tokens_NS = rollouts.tokens_NS
        logp_NSV = params["table"][tokens_NS[:, :-1]].log_softmax(-1)  # predicts the next token
        drawn_NS = logp_NSV.gather(2, tokens_NS[:, 1:, None]).squeeze(2)
        entropy_NS = -(logp_NSV.exp() * logp_NSV).sum(2)
        pad = (1, 0)  # nothing predicts the first token, which is the prompt
        scores = [torch.nn.functional.pad(x_NS, pad) for x_NS in (drawn_NS, entropy_NS)]
        return Scores(*(torch.where(rollouts.response_NS, x_NS, 0.0) for x_NS in scores))


@torch.no_grad()
def draw(policy: BigramPolicy, seed: int) -> Rollouts:
    """GROUP responses to each prompt; prompt i is the single token i % VOCABULARY."""
    generator = torch.Generator().manual_seed(seed)
    prompt_N = torch.arange(PROMPTS).repeat_interleave(GROUP)
    columns = [prompt_N % VOCABULARY]
    for _ in range(LENGTH):
        probability_NV = policy.params["table"][columns[-1]].softmax(-1)
        columns.append(torch.multinomial(probability_NV, 1, generator=generator).squeeze(1))
    tokens_NS = torch.stack(columns, 1)
    response_NS = torch.ones_like(tokens_NS, dtype=torch.bool)
    response_NS[:, 0] = False
    return Rollouts(
        tokens_NS=tokens_NS,
        attention_NS=torch.ones_like(response_NS),
        response_NS=response_NS,
        prompt_N=prompt_N + seed * PROMPTS,
    )


def learn_to_say_two(rollouts: Rollouts) -> UpdateBatch:
    """Reward: how often "2" was said, relative to the group."""
    reward_N = ((rollouts.tokens_NS == 2) & rollouts.response_NS).float().sum(1)
    reward_PG = reward_N.view(PROMPTS, GROUP)
    advantage_N = (reward_PG - reward_PG.mean(1, keepdim=True)).flatten()
    advantage_NS = advantage_N[:, None].expand(rollouts.tokens_NS.shape)
    return UpdateBatch(rollouts=rollouts, advantage_NS=advantage_NS, reward_N=reward_N)


if __name__ == "__main__":
    policy = BigramPolicy()
    optimizer = torch.optim.AdamW(policy.params.values(), lr=0.02)
    batch, evaluation = learn_to_say_two(draw(policy, 1)), draw(policy, 2)
    analysis = analyze_step(policy, optimizer, batch, evaluation, StepOptions())
    print(analysis.ledger)

    by_token = analysis.tokens.value_NS
    print("\nnats of this step by the token that was drawn:")
    for token in range(VOCABULARY):
        drawn = batch.rollouts.response_NS & (batch.rollouts.tokens_NS == token)
        print(f"  {token}: {float(by_token[drawn].sum()):+.5f}")
