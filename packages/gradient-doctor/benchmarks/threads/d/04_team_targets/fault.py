import copy
import random

import torch
import torch.nn as nn

torch.manual_seed(0)
random.seed(0)
LENGTH, GAMMA = 8, 0.9


class Corridor:
    """Two agents push a box to the right; it only moves right when both push."""

    def reset(self):
        self.place = 0
        return self.place

    def step(self, a, b):
        self.place = self.place + 1 if a and b else max(self.place - 1, 0)
        done = self.place == LENGTH - 1
        return self.place, 1.0 if done else 0.0, done


class QMixNet(nn.Module):
    def __init__(self, n=LENGTH, hidden=32):
        super().__init__()
        self.agents = nn.ModuleList(
            [nn.Sequential(nn.Linear(n, hidden), nn.ReLU(), nn.Linear(hidden, 2)) for _ in range(2)])
        self.mix = nn.Linear(n, 3)

    def forward(self, place):
        s = nn.functional.one_hot(place, LENGTH).float()
        return [agent(s) for agent in self.agents], self.mix(s)

    def total(self, place, joint=None):
        qs, mix = self(place)
        if joint is None:
            chosen = [q.max(1).values for q in qs]
        else:
            chosen = [q.gather(1, joint[:, i : i + 1]).squeeze(1) for i, q in enumerate(qs)]
        return mix[:, 0].exp() * chosen[0] + mix[:, 1].exp() * chosen[1] + mix[:, 2]


class Policy:
    def __init__(self):
        self.eval_qmix_net = QMixNet()
        self.target_qmix_net = copy.deepcopy(self.eval_qmix_net)
        self.optimizer = torch.optim.Adam(self.eval_qmix_net.parameters(), lr=5e-3)

    def learn(self, batch, step):
        s, joint, r, s2, done = [torch.tensor(x) for x in zip(*batch)]
        with torch.no_grad():
            y = r + GAMMA * (1 - done) * self.target_qmix_net.total(s2)
        loss = nn.functional.mse_loss(self.eval_qmix_net.total(s, joint), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if step > 0 and step % 20 == 0:
            self.target_qmix_net.load_state_dict(self.target_qmix_net.state_dict())
        return loss.item()


env, policy, memory = Corridor(), Policy(), []
place = env.reset()
for _ in range(6000):
    joint = [int(random.random() < 0.8) for _ in range(2)]
    after, reward, done = env.step(*joint)
    memory.append((place, joint, reward, after, float(done)))
    place = env.reset() if done else after
for step in range(601):
    loss = policy.learn(random.sample(memory, 64), step)
    if step % 100 == 0:
        with torch.no_grad():
            start = policy.eval_qmix_net.total(torch.tensor([0])).item()
            qs, _ = policy.eval_qmix_net(torch.arange(LENGTH - 1))
            push = sum(q.argmax(1).sum().item() for q in qs)
        print(f"{step} td loss {loss:.5f} Q(start) {start:.3f} (true {GAMMA ** (LENGTH - 2):.3f}) pushes {push}/{2 * LENGTH - 2}")
