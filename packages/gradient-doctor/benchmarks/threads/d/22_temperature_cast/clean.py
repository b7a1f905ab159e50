import math

import torch
import torch.nn as nn

torch.manual_seed(0)


class SACModel(nn.Module):
    def __init__(self, obs=3, act=2, initial_alpha=1.0):
        super().__init__()
        self.action_model = nn.Sequential(nn.Linear(obs, 32), nn.ReLU(), nn.Linear(32, 2 * act))
        self.q_net = nn.Sequential(nn.Linear(obs + act, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
        self.log_alpha = torch.tensor(math.log(initial_alpha), requires_grad=True)
        self.target_entropy = -3.0 * act

    def move(self, dtype):
        self.to(dtype)
        self.log_alpha.data = self.log_alpha.data.to(dtype)

    def sample(self, obs):
        mean, log_std = self.action_model(obs).chunk(2, -1)
        dist = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        action = dist.rsample()
        return action, dist.log_prob(action).sum(-1)

    def q(self, obs, action):
        return self.q_net(torch.cat([obs, action], -1)).squeeze(-1)


class SACPolicy:
    def __init__(self, model, dtype=torch.float64):
        self.model = model
        self.actor_optim = torch.optim.Adam(model.action_model.parameters(), lr=3e-3)
        self.critic_optim = torch.optim.Adam(model.q_net.parameters(), lr=3e-3)
        self.alpha_optim = torch.optim.Adam([model.log_alpha], lr=2e-2)
        model.move(dtype)
        self.dtype = dtype

    def losses(self, obs, action, reward):
        alpha = self.model.log_alpha.exp()
        critic_loss = (self.model.q(obs, action) - reward).square().mean()
        new_action, logp = self.model.sample(obs)
        actor_loss = (alpha.detach() * logp - self.model.q(obs, new_action)).mean()
        alpha_loss = -(self.model.log_alpha * (logp + self.model.target_entropy).detach()).mean()
        return critic_loss, actor_loss, alpha_loss, -logp.mean().item()

    def learn_on_batch(self, obs, action, reward):
        *losses, entropy = self.losses(obs, action, reward)
        for opt, loss in zip((self.critic_optim, self.actor_optim, self.alpha_optim), losses):
            opt.zero_grad()
            grads = torch.autograd.grad(loss, opt.param_groups[0]["params"])
            for p, g in zip(opt.param_groups[0]["params"], grads):
                p.grad = g
        for opt in (self.critic_optim, self.actor_optim, self.alpha_optim):
            opt.step()
        return entropy


policy = SACPolicy(SACModel())
memory = []
for it in range(401):
    with torch.no_grad():
        obs = torch.randn(16, 3, dtype=policy.dtype)
        action, _ = policy.model.sample(obs)
        reward = -(action - torch.sin(2 * obs[:, :2])).square().sum(-1)
        memory.append((obs, action, reward))
    pick = torch.randint(max(0, it - 150), len(memory), (8,)).tolist()
    entropy = policy.learn_on_batch(*(torch.cat(t) for t in zip(*[memory[i] for i in pick])))
    if it % 80 == 0:
        print(f"iter {it} reward {reward.mean():.3f} entropy {entropy:.2f} alpha {policy.model.log_alpha.exp().item():.4f}")
