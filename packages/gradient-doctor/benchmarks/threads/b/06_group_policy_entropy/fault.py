import torch
import torch.nn as nn

torch.manual_seed(5)
VOCAB, LEN, PROMPTS, GROUP, ENT_COEF = 12, 6, 8, 8, 0.3


class PolicyLM(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


@torch.no_grad()
def generate(model, prompt):
    ids = prompt
    for _ in range(LEN):
        probs = model(ids)[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probs, 1)], dim=1)
    return ids


def logps_and_entropies(model, ids):
    logits = model(ids[:, :-1])[:, -LEN:]
    logp_all = logits.log_softmax(-1)
    logps = logp_all.gather(-1, ids[:, -LEN:].unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        entropies = -(logp_all.exp() * logp_all).sum(-1)
    return logps, entropies


def reward_fn(completion):
    return (completion == 3).float().mean(-1)


def grpo_loss(model, ids, adv):
    logps, entropies = logps_and_entropies(model, ids)
    ratio = torch.exp(logps - logps.detach())
    policy_loss = -(ratio * adv.unsqueeze(1)).mean()
    entropy = entropies.mean()
    return policy_loss - ENT_COEF * entropy, entropy


def main():
    model = PolicyLM()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(25):
        prompt = torch.randint(VOCAB, (PROMPTS, 2)).repeat_interleave(GROUP, dim=0)
        ids = generate(model, prompt)
        reward = reward_fn(ids[:, -LEN:]).view(PROMPTS, GROUP)
        adv = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        loss, entropy = grpo_loss(model, ids, adv.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 6 == 0:
            print(f"step {step} loss {loss.item():.4f} reward {reward.mean().item():.3f} entropy {entropy.item():.3f}")


if __name__ == "__main__":
    main()
