import torch
import torch.nn as nn
from torch.distributions import Categorical

torch.manual_seed(0)


class ActorCritic(nn.Module):
    def __init__(self, n_state=4, n_action=3):
        super().__init__()
        self.policy = nn.Linear(n_state, n_action)
        self.value = nn.Linear(n_state, 1)

    def forward(self, s):
        return self.policy(s), self.value(s)


class Arena:
    """Contextual choices: the state decides which action pays."""

    def __init__(self):
        self.level = torch.tensor([25.0, -15.0, 10.0, 5.0])
        self.pay = torch.randn(4, 3)

    def reset(self, n):
        self.state = torch.randn(n, 4)
        return self.state

    def step(self, action):
        bonus = (self.state @ self.pay).argmax(1).eq(action).float()
        return self.state @ self.level + bonus, bonus


def train(updates=30, n=128):
    env, net = Arena(), ActorCritic()
    optimizer = torch.optim.Adam([
        {"params": net.policy.parameters(), "lr": 0.1},
        {"params": net.value.parameters(), "lr": 3.0}])
    for update in range(updates):
        states = env.reset(n)
        logits, values_v = net(states)
        dist = Categorical(logits=logits)
        actions = dist.sample()
        returns, bonus = env.step(actions)

        adv_v = returns - values_v.detach()
        loss_policy = -(dist.log_prob(actions) * adv_v).mean()
        loss_value = nn.functional.mse_loss(values_v.squeeze(-1), returns)

        optimizer.zero_grad()
        (loss_policy + loss_value).backward()
        optimizer.step()
        if update % 5 == 0 or update == updates - 1:
            print(f"update {update:2d} value loss {loss_value.item():9.3f} "
                  f"adv std {adv_v.std().item():7.3f} good choices {bonus.mean().item():.2f}")


train()
