import torch
import torch.nn as nn

torch.manual_seed(3)
N_ENVS, T, GAMMA, LAM = 32, 12, 0.9, 0.9


class NoisyWalk:
    def __init__(self):
        self.pos = torch.zeros(N_ENVS)

    def step(self, action):
        drift = 0.6 * (action.float() * 2 - 1)
        self.pos = (0.7 * self.pos + drift + torch.randn(N_ENVS)).clamp(-4, 4)
        return self.pos.clone(), self.pos.clone()


class A2C(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
        self.actor = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2))
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), lr=5e-3)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=1e-3)

    def act(self, obs):
        dist = torch.distributions.Categorical(logits=self.actor(obs))
        action = dist.sample()
        return action, dist.log_prob(action), dist.entropy(), self.critic(obs).squeeze(-1)

    def losses(self, rewards, log_probs, value_preds, entropy):
        steps = len(rewards)
        advantages = torch.zeros(steps, N_ENVS)
        old_values = value_preds.detach()
        gae = 0.0
        for t in reversed(range(steps - 1)):
            td_error = rewards[t] + GAMMA * old_values[t + 1] - old_values[t]
            gae = td_error + GAMMA * LAM * gae
            advantages[t] = gae
        critic_loss = (advantages + old_values - value_preds)[:-1].pow(2).mean()
        actor_loss = -(advantages[:-1].detach() * log_probs[:-1]).mean() - 0.01 * entropy.mean()
        return critic_loss, actor_loss


agent, env = A2C(), NoisyWalk()
obs = env.pos.clone()
for update in range(300):
    rews, logps, vals, ents = [], [], [], []
    for _ in range(T):
        a, lp, ent, v = agent.act(obs.unsqueeze(-1))
        obs, r = env.step(a)
        rews.append(r), logps.append(lp), vals.append(v), ents.append(ent)
    rews, logps, vals, ents = map(torch.stack, (rews, logps, vals, ents))
    critic_loss, actor_loss = agent.losses(rews, logps, vals, ents)
    agent.critic_opt.zero_grad()
    critic_loss.backward()
    agent.critic_opt.step()
    agent.actor_opt.zero_grad()
    actor_loss.backward()
    agent.actor_opt.step()
    if update % 60 == 59:
        with torch.no_grad():
            spread = agent.critic(torch.tensor([[2.0], [-2.0]])).squeeze()
        print(f"update {update + 1}  critic loss {critic_loss.item():.3f}  reward {rews.mean().item():.3f}"
              f"  V(2)-V(-2) {(spread[0] - spread[1]).item():.2f}")
