import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)
N_ENVS, STEPS, N_JOBS = 2, 36, 5


class ActorCritic(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.critic = nn.Sequential(nn.Linear(2 * N_JOBS + 1, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, jobs, load):
        pi = torch.softmax(self.actor(jobs).squeeze(-1), dim=-1)
        return pi, self.critic(torch.cat([jobs.flatten(1), load], dim=1))


class Memory:
    def __init__(self, policy):
        self.jobs = torch.rand(STEPS, N_JOBS, 2)
        self.load = torch.rand(STEPS, 1)
        with torch.no_grad():
            dist = Categorical(policy(self.jobs, self.load)[0])
            self.actions = dist.sample()
            self.logprobs = dist.log_prob(self.actions)
        picked = self.jobs[torch.arange(STEPS), self.actions]
        self.gain = picked[:, 1] - picked[:, 0]
        self.rewards = self.gain - 20.0 * self.load.squeeze(1)


class PPO:
    def __init__(self, lr=3e-3, k_epochs=2, eps_clip=0.2, vloss_coef=1.0, ent_coef=0.001):
        self.policy = ActorCritic()
        self.optimizer = torch.optim.Adam([{"params": self.policy.actor.parameters()}, {"params": self.policy.critic.parameters(), "lr": 10 * lr}], lr=lr)
        self.v_loss = nn.MSELoss()
        self.k_epochs, self.eps_clip = k_epochs, eps_clip
        self.vloss_coef, self.ent_coef = vloss_coef, ent_coef

    def update(self, memories):
        for _ in range(self.k_epochs):
            loss_sum = 0.0
            for m in memories:
                pis, vals = self.policy(m.jobs, m.load)
                dist = Categorical(pis)
                ratios = torch.exp(dist.log_prob(m.actions) - m.logprobs)
                advantages = m.rewards - vals.view(-1).detach()
                surr1 = ratios * advantages
                surr2 = torch.clamp(ratios, 1 - self.eps_clip, 1 + self.eps_clip) * advantages
                p_loss = -torch.min(surr1, surr2).mean()
                v_loss = self.v_loss(vals.squeeze(), m.rewards)
                loss_sum = loss_sum + p_loss + self.vloss_coef * v_loss - self.ent_coef * dist.entropy().mean()
            self.optimizer.zero_grad()
            loss_sum.backward()
            self.optimizer.step()
        return v_loss.item()


ppo = PPO()
for it in range(1, 201):
    memories = [Memory(ppo.policy) for _ in range(N_ENVS)]
    v_loss = ppo.update(memories)
    if it % 40 == 0:
        gain = sum(Memory(ppo.policy).gain.mean().item() for _ in range(20)) / 20
        print(f"iter {it}  gain of the dispatched job {gain:.3f}  critic loss {v_loss:.3f}")
