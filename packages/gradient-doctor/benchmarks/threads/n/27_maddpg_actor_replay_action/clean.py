import copy
import torch
import torch.nn as nn

torch.manual_seed(0)
AGENTS, OBS, ACT, GAMMA, TAU = 2, 3, 2, 0.9, 0.02


def mlp(i, o, last=None):
    layers = [nn.Linear(i, 48), nn.ReLU(), nn.Linear(48, o)]
    return nn.Sequential(*layers, last) if last else nn.Sequential(*layers)


class Agent:
    def __init__(self):
        self.actor = mlp(OBS, ACT, nn.Tanh())
        self.critic = mlp(AGENTS * (OBS + ACT), 1)
        self.target_actor, self.target_critic = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=2e-3)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=4e-3)

    def soft_update(self):
        pairs = ((self.actor, self.target_actor), (self.critic, self.target_critic))
        for source, target in pairs:
            for p, q in zip(source.parameters(), target.parameters()):
                q.data.lerp_(p.data, TAU)


def rewards(obs, act):
    goal = obs[..., :ACT].tanh() * 0.8
    return -(act - goal).pow(2).sum(-1) - 0.2 * (act.sum(1, keepdim=True) - goal.sum(1, keepdim=True)).pow(2).sum(-1)


def replay(n=128):
    obs = torch.randn(n, AGENTS, OBS)
    act = torch.rand(n, AGENTS, ACT) * 2 - 1
    return obs, act, rewards(obs, act), 0.5 * obs + 0.5 * torch.randn_like(obs)


def joint(obs, act):
    return torch.cat([obs.flatten(1), act.flatten(1)], -1)


def train_step(agents):
    obs, act, reward, obs_next = replay()
    with torch.no_grad():
        act_next = torch.stack([a.target_actor(obs_next[:, i]) for i, a in enumerate(agents)], 1)
    q_values = []
    for i, agent in enumerate(agents):
        with torch.no_grad():
            y = reward[:, i] + GAMMA * agent.target_critic(joint(obs_next, act_next)).squeeze(-1)
        critic_loss = (agent.critic(joint(obs, act)).squeeze(-1) - y).pow(2).mean()
        agent.critic_optimizer.zero_grad()
        critic_loss.backward()
        agent.critic_optimizer.step()
        act_new = act.clone()
        act_new[:, i] = agent.actor(obs[:, i])
        actor_loss = -agent.critic(joint(obs, act_new)).mean()
        agent.actor_optimizer.zero_grad()
        actor_loss.backward()
        agent.actor_optimizer.step()
        agent.soft_update()
        q_values.append(actor_loss.item())
    return sum(q_values)


agents = [Agent() for _ in range(AGENTS)]
for step in range(301):
    loss = train_step(agents)
    if step % 60 == 0:
        with torch.no_grad():
            obs = torch.randn(256, AGENTS, OBS)
            act = torch.stack([a.actor(obs[:, i]) for i, a in enumerate(agents)], 1)
        print(f"step {step:3d}  actor loss {loss:.3f}  reward {rewards(obs, act).mean().item():.3f}")
