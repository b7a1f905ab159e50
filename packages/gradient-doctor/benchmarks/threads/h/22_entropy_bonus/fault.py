import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(30)
PROMPTS, TOKENS = 6, 8


class ActorCritic(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(PROMPTS, dim)
        self.actor = nn.Linear(dim, TOKENS)
        self.critic = nn.Sequential(nn.Embedding(PROMPTS, 1), nn.Flatten(0))

    def forward(self, prompt):
        return self.actor(self.embed(prompt)), self.critic(prompt)


PAYOFF = 0.3 * torch.rand(PROMPTS, TOKENS)
PAYOFF[torch.arange(PROMPTS), torch.randint(0, TOKENS, (PROMPTS,))] = 1.0


class PPOTrainer:
    def __init__(self, model, beta=0.1, clip=0.2):
        self.model, self.beta, self.clip = model, beta, clip
        self.opt = torch.optim.Adam(model.parameters(), lr=5e-3)

    def make_experience(self, n=48):
        prompt = torch.randint(0, PROMPTS, (n,))
        with torch.no_grad():
            logits, _ = self.model(prompt)
            token = torch.multinomial(logits.softmax(-1), 1)
            old_logp = logits.log_softmax(-1).gather(1, token)
        reward = PAYOFF[prompt, token[:, 0]] + 0.1 * torch.randn(n)
        return prompt, token, old_logp, reward

    def learn(self, epochs=3):
        prompt, token, old_logp, reward = self.make_experience()
        for _ in range(epochs):
            logits, value = self.model(prompt)
            logp_all = logits.log_softmax(-1)
            entropy = (logp_all.exp() * logp_all).sum(-1)
            ratio = (logp_all.gather(1, token) - old_logp).exp().squeeze(1)
            adv = (reward - value).detach()
            surrogate = torch.min(ratio * adv, ratio.clamp(1 - self.clip, 1 + self.clip) * adv)
            policy_loss = -(surrogate + self.beta * entropy).mean()
            loss = policy_loss + 0.5 * F.mse_loss(value, reward)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
        return loss.item(), reward.mean().item()


trainer = PPOTrainer(ActorCritic())
for it in range(301):
    loss, reward = trainer.learn()
    if it % 50 == 0:
        with torch.no_grad():
            p = trainer.model(torch.arange(PROMPTS))[0].softmax(-1)
        spread = -(p * p.clamp(min=1e-12).log()).sum(-1).mean().item()
        print(f"iter {it} loss {loss:.4f} reward {reward:.3f} expected {(p * PAYOFF).sum(1).mean():.3f} spread {spread:.4f}")
