import torch
import torch.nn as nn

torch.manual_seed(0)
N_PROMPTS, N_TOKENS, ACCUM = 4, 6, 4


class AccumulatingOptimizer:
    """Thin wrapper: step and zero_grad are only effective on the sync micro step."""

    def __init__(self, optimizer, accumulation):
        self.optimizer, self.accumulation, self.count = optimizer, accumulation, 0

    @property
    def sync(self):
        return self.count % self.accumulation == 0

    def begin(self):
        self.count += 1

    def step(self):
        if self.sync:
            self.optimizer.step()

    def zero_grad(self):
        if self.sync:
            self.optimizer.zero_grad()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.prompt = nn.Embedding(N_PROMPTS, 16)
        self.head = nn.Linear(16, N_TOKENS)

    def forward(self, prompt_ids):
        return torch.distributions.Categorical(logits=self.head(torch.tanh(self.prompt(prompt_ids))))


best_token = torch.tensor([1, 4, 0, 5])


def rollout(policy, prompt_id, n=64):
    prompts = torch.full((n,), prompt_id)
    with torch.no_grad():
        dist = policy(prompts)
        actions = dist.sample()
        old_logprob = dist.log_prob(actions)
    reward = (actions == best_token[prompts]).float() + 0.1 * torch.randn(n)
    return prompts, actions, old_logprob, reward - reward.mean()


policy = Policy()
optimizer = AccumulatingOptimizer(torch.optim.Adam(policy.parameters(), lr=0.02), ACCUM)

for update in range(40):
    micro_batches = [rollout(policy, p) for p in range(N_PROMPTS)]
    total, entropy = 0.0, 0.0
    for prompts, actions, old_logprob, advantage in micro_batches:
        optimizer.begin()
        ratio = (policy(prompts).log_prob(actions) - old_logprob).exp()
        surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = -surrogate.mean() / ACCUM
        loss.backward()
        optimizer.step()
        policy.zero_grad()
        total += loss.item()
        entropy += policy(prompts[:1]).entropy().item() / ACCUM
    if update % 8 == 0 or update == 39:
        with torch.no_grad():
            p = policy(torch.arange(N_PROMPTS)).probs[torch.arange(N_PROMPTS), best_token]
        print(update, f"loss {total:.4f} entropy {entropy:.3f}", "p(best) per prompt", [round(v, 2) for v in p.tolist()])
