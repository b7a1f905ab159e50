import random

import torch
import torch.nn as nn

torch.manual_seed(0)
random.seed(0)


class Fork:
    """From room 0 one lands in room 1 (pays 1) or room 2 (pays 0), by chance."""

    def rollout(self, n):
        for _ in range(n):
            room = random.choice((1, 2))
            yield 0, 0, 0.0, room, 0.0
            yield room, 0, 1.0 if room == 1 else 0.0, room, 1.0
            yield room, 1, 0.6 if room == 1 else -0.4, room, 1.0
            yield 0, 1, 0.1, 0, 1.0


class DoubleDQN:
    def __init__(self, model, gamma=1.0, lr=0.05):
        self.gamma = gamma
        self.policy_net = model
        self.target_net = model
        self.memory = []
        self.optimizer = torch.optim.SGD(self.policy_net.parameters(), lr=lr)

    def update(self, batch=32):
        rows = random.sample(self.memory, batch)
        state, action, reward, following, done = (torch.tensor(column) for column in zip(*rows))
        q = self.policy_net(state).gather(1, action[:, None]).squeeze(1)
        next_q = self.policy_net(following)
        next_target = self.target_net(following)
        best = next_target.gather(1, next_q.argmax(1, keepdim=True)).squeeze(1)
        expected = reward + self.gamma * best * (1 - done)
        loss = (q - expected).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def sync(self):
        self.target_net.load_state_dict(self.policy_net.state_dict())


def main(updates=1200):
    agent = DoubleDQN(nn.Sequential(nn.Embedding(3, 8), nn.Linear(8, 2)))
    agent.memory.extend(Fork().rollout(300))
    for update in range(updates):
        loss = agent.update()
        if update % 10 == 0:
            agent.sync()
        if update % 200 == 0 or update == updates - 1:
            value = agent.policy_net(torch.arange(3))[:, 0].tolist()
            shown = " ".join(f"{v:+.2f}" for v in value)
            print(f"update {update:4d} loss {loss:.4f} values {shown} (true +0.50 +1.00 +0.00)")


main()
