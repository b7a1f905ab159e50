import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)

WORDS = ["0", "1", "2", "3", "4", "5", "+", "="]


class Policy(nn.Module):
    """Writes a short completion, one word at a time."""

    def __init__(self, vocab=len(WORDS), width=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.cell = nn.GRUCell(width, width)
        self.head = nn.Linear(width, vocab)

    def step(self, word, state):
        state = self.cell(self.embed(word), state)
        return self.head(state), state

    def log_probs(self, prompt, completion):
        state, word, out = None, prompt, []
        for t in range(completion.shape[1]):
            logits, state = self.step(word, state)
            logp = F.log_softmax(logits, dim=-1)
            out.append(logp.gather(1, completion[:, t : t + 1]).squeeze(1))
            word = completion[:, t]
        return torch.stack(out, 1)

    @torch.no_grad()
    def sample(self, prompt, length=3):
        state, word, words = None, prompt, []
        for _ in range(length):
            logits, state = self.step(word, state)
            word = torch.multinomial(logits.softmax(-1), 1).squeeze(1)
            words.append(word)
        return torch.stack(words, 1)


def answer_reward(prompt, completion):
    rewards = []
    for p, words in zip(prompt.tolist(), completion.tolist()):
        text = " ".join(WORDS[w] for w in words)
        rewards.append(1.0 if text == f"<answer>{WORDS[p]}</answer>" else 0.0)
    return torch.tensor(rewards)


def train(steps=18, prompts=8, group=16):
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    for step in range(steps):
        prompt = torch.randint(0, 6, (prompts,)).repeat_interleave(group)
        completion = policy.sample(prompt)
        rewards = answer_reward(prompt, completion).view(prompts, group)
        advantages = rewards - rewards.mean(1, keepdim=True)
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)

        logp = policy.log_probs(prompt, completion)
        ratio = torch.exp(logp - logp.detach())
        loss = -(ratio * advantages.view(-1, 1)).mean()

        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if step % 3 == 0 or step == steps - 1:
            right = (completion == prompt[:, None]).float().mean().item()
            print(f"{step:2d} loss {loss.item():+.3f} grad {norm.item():.3f} right {right:.2f}")


train()
