import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
N_AGENTS, T, GAMMA = 16, 12, 0.9


class ActorCritic(nn.Module):
    def __init__(self, obs=2, n_actions=4, hidden=32):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh(), nn.Linear(hidden, n_actions))
        self.critic = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, feature):
        return self.actor(feature), self.critic(feature).squeeze(-1)


MOVES = torch.tensor([[0.3, 0.0], [-0.3, 0.0], [0.0, 0.3], [0.0, -0.3]])


def rollout(network):
    pos = torch.rand(N_AGENTS, 2) * 4 - 2
    obs, acts, rewards = [], [], []
    for _ in range(T):
        with torch.no_grad():
            a = torch.distributions.Categorical(logits=network(pos)[0]).sample()
        nxt = pos + MOVES[a]
        obs.append(pos)
        acts.append(a)
        rewards.append(4.0 * (pos.norm(dim=1) - nxt.norm(dim=1)))
        pos = nxt
    return torch.stack(obs), torch.stack(acts), torch.stack(rewards), pos


def expected_returns(rewards):
    out, acc = [], torch.zeros(N_AGENTS)
    for r in reversed(rewards):
        acc = r + GAMMA * acc
        out.append(acc)
    return torch.stack(out[::-1])


def policy_gradient_loss(network, obs, acts, rewards):
    logits, predicted_values = network(obs)
    log_probs = torch.distributions.Categorical(logits=logits).log_prob(acts)
    returns = expected_returns(rewards)
    advantage = returns - predicted_values
    actor_loss = -1 * (log_probs * advantage.detach()).sum(0).sum()
    critic_loss = F.huber_loss(predicted_values, returns, reduction="none").sum(0).sum()
    return actor_loss + critic_loss, (predicted_values - returns).abs().mean()


network = ActorCritic()
opt = torch.optim.Adam(network.parameters(), lr=2e-3)
for episode in range(150):
    obs, acts, rewards, final = rollout(network)
    loss, value_error = policy_gradient_loss(network, obs, acts, rewards)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if episode % 25 == 24:
        print(f"episode {episode + 1}  reward {rewards.sum(0).mean().item():6.3f}  final distance {final.norm(dim=1).mean().item():.3f}  value error {value_error.item():.3f}")
