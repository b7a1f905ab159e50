import torch
import torch.nn as nn
from torch.distributions import Categorical

torch.manual_seed(2)
OBS, ACTIONS, HORIZON = 4, 3, 128


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBS, 32), nn.Tanh(), nn.Linear(32, ACTIONS))

    def forward(self, obs):
        return Categorical(logits=self.net(obs))


class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBS, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, obs):
        return self.net(obs)


class Env:
    def __init__(self):
        self.w = torch.randn(OBS, ACTIONS)

    def rollout(self, policy):
        obs = torch.randn(HORIZON, OBS)
        with torch.no_grad():
            dist = policy(obs)
            action = dist.sample()
            logp = dist.log_prob(action)
        reward = (action == (obs @ self.w).argmax(-1)).float()
        return obs, action, logp, reward


def estimate_advantages(reward, value):
    returns = reward.unsqueeze(1)
    adv = returns - value
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    return adv, returns


def ppo_step(policy, value_net, opt_p, opt_v, obs, action, old_logp, adv, returns, clip=0.2):
    opt_v.zero_grad()
    value_loss = (value_net(obs) - returns).pow(2).mean()
    value_loss.backward()
    opt_v.step()

    opt_p.zero_grad()
    ratio = torch.exp(policy(obs).log_prob(action) - old_logp)
    surr1 = ratio * adv
    surr2 = ratio.clamp(1 - clip, 1 + clip) * adv
    policy_loss = -torch.min(surr1, surr2).mean()
    policy_loss.backward()
    opt_p.step()
    return policy_loss.item(), value_loss.item()


def main():
    env, policy, value_net = Env(), Policy(), Value()
    opt_p = torch.optim.Adam(policy.parameters(), lr=1e-2)
    opt_v = torch.optim.Adam(value_net.parameters(), lr=1e-2)
    for it in range(3):
        obs, action, logp, reward = env.rollout(policy)
        with torch.no_grad():
            adv, returns = estimate_advantages(reward, value_net(obs))
        for _ in range(5):
            p_loss, v_loss = ppo_step(policy, value_net, opt_p, opt_v, obs, action, logp, adv, returns)
        print(f"iter {it} reward {reward.mean().item():.3f} policy loss {p_loss:.4f} value loss {v_loss:.4f}")
    print(f"final reward {env.rollout(policy)[3].mean().item():.3f}")


if __name__ == "__main__":
    main()
