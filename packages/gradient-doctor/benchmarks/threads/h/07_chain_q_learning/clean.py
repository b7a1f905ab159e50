import random
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
random.seed(0)
N, GAMMA = 6, 0.95


class Corridor:
    """Walk right to the last cell: reward 1 and a new episode starts."""

    def reset(self):
        self.pos = 0
        return self.obs()

    def obs(self):
        return F.one_hot(torch.tensor(self.pos), N).float()

    def step(self, a):
        self.pos = max(0, self.pos + (1 if a == 1 else -1))
        done = self.pos == N - 1
        reward = 1.0 if done else 0.0
        nxt = self.reset() if done else self.obs()
        return nxt, reward, done


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(N, 32), nn.Linear(32, 2)

    def forward(self, s):
        return self.fc2(torch.relu(self.fc1(s)))


def collect(steps):
    env, memory = Corridor(), []
    s = env.reset()
    for _ in range(steps):
        a = random.randrange(2)
        s2, r, done = env.step(a)
        memory.append((s, a, r, s2, float(done)))
        s = s2
    return memory


def td_loss(q, target_q, batch):
    s, a, r, s2, done = zip(*batch)
    s, s2 = torch.stack(s), torch.stack(s2)
    a, r, done = torch.tensor(a), torch.tensor(r), torch.tensor(done)
    q_sa = q(s).gather(1, a.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        best_next = target_q(s2).max(1)[0]
        expected = r + GAMMA * best_next * (1 - done)
    return F.smooth_l1_loss(q_sa, expected)


memory = collect(2000)
q, target_q = QNet(), QNet()
target_q.load_state_dict(q.state_dict())
opt = torch.optim.Adam(q.parameters(), lr=3e-3)
for it in range(1, 1501):
    loss = td_loss(q, target_q, random.sample(memory, 64))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 20 == 0:
        target_q.load_state_dict(q.state_dict())
    if it % 300 == 0:
        with torch.no_grad():
            values = q(torch.eye(N)[:N - 1]).max(1)[0]
        print(it, "loss %.4f" % loss.item(), "max Q per cell", [round(v, 2) for v in values.tolist()])
print("best possible return from each cell", [round(GAMMA ** (N - 2 - i), 2) for i in range(N - 1)])
