"""Double DQN with dueling heads: replay memory, a frozen target network, soft updates."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

STEPS, WALKERS, ROWS, STATE, HIDDEN, ACTIONS = 6, 16, 24, 4, 16, 3
GAMMA, MIXING = 0.9, 0.05


class QNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(STATE, HIDDEN), nn.SiLU())
        self.value = nn.Linear(HIDDEN, 1)
        self.advantage = nn.Linear(HIDDEN, ACTIONS)

    def forward(self, state):
        hidden = self.encoder(state)
        advantage = self.advantage(hidden)
        centred = advantage - advantage.mean(-1, keepdim=True)
        return self.value(hidden) + centred


@torch.no_grad()
def act(online, state, epsilon, generator):
    greedy = online(state).argmax(-1)
    random = torch.randint(0, ACTIONS, greedy.shape, generator=generator)
    explore = torch.rand(greedy.shape, generator=generator) < epsilon
    return torch.where(explore, random, greedy)


def walk(state, action, generator):
    push = (action.float() - 1.0)[:, None]
    after = 0.9 * state + 0.3 * push + 0.1 * torch.randn(state.shape, generator=generator)
    reward = 1.0 - after.square().mean(-1)
    done = (after.abs().amax(-1) > 2.5).float()
    return {"state": state, "action": action, "reward": reward, "after": after, "done": done}


def sample(memory, generator):
    pool = {name: torch.cat([part[name] for part in memory]) for name in memory[0]}
    chosen = torch.randint(0, len(pool["done"]), (ROWS,), generator=generator)
    return {name: values[chosen] for name, values in pool.items()}


def loss_of(online, target, batch):
    chosen = online(batch["state"]).gather(-1, batch["action"][:, None]).squeeze(-1)
    with torch.no_grad():
        best = online(batch["after"]).argmax(-1, keepdim=True)
        future = target(batch["after"]).gather(-1, best).squeeze(-1)
        goal = batch["reward"] + GAMMA * (1.0 - batch["done"]) * future
    return F.smooth_l1_loss(chosen, goal)


@torch.no_grad()
def follow(target, online):
    for slow, fast in zip(target.parameters(), online.parameters()):
        slow.lerp_(fast, MIXING)


def build():
    torch.manual_seed(0)
    online = QNetwork()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=3e-3)
    return online, target, optimizer


def main():
    online, target, optimizer = build()
    generator = torch.Generator().manual_seed(1)
    state = torch.randn(WALKERS, STATE, generator=generator)
    memory = []
    for step in range(STEPS):
        action = act(online, state, 0.3, generator)
        memory.append(walk(state, action, generator))
        ended = memory[-1]["done"].bool()[:, None]
        state = torch.where(ended, torch.zeros(()), memory[-1]["after"])
        loss = loss_of(online, target, sample(memory, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        optimizer.step()
        follow(target, online)
        print(f"step {step} loss {loss.item():.4f} reward {memory[-1]['reward'].mean():.3f}")


if __name__ == "__main__":
    main()
