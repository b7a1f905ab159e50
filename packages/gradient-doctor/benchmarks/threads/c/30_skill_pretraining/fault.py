import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


class Encoder(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, width)
        )

    def forward(self, obs):
        return self.net(obs)


class Contrast(nn.Module):
    """Which skill explains the change from one state to the next."""

    def __init__(self, width=16, skills=8, proj=16):
        super().__init__()
        self.pair = nn.Linear(2 * width, proj)
        self.skill = nn.Linear(skills, proj)

    def forward(self, state, following, skill):
        key = F.normalize(self.pair(torch.cat([state, following], 1)), dim=1)
        query = F.normalize(self.skill(skill), dim=1)
        return query @ key.T / 0.2


class Agent:
    def __init__(self):
        self.encoder, self.cic = Encoder(), Contrast()
        self.encoder_opt = torch.optim.Adam(self.encoder.parameters(), lr=5e-3)
        self.cic_opt = torch.optim.Adam(self.cic.parameters(), lr=5e-3)

    def update(self, obs, next_obs, skill):
        with torch.no_grad():
            state = self.encoder(obs)
            following = self.encoder(next_obs)
        logits = self.cic(state, following, skill)
        loss = F.cross_entropy(logits, torch.arange(len(obs)))
        self.encoder_opt.zero_grad()
        self.cic_opt.zero_grad()
        loss.backward()
        self.cic_opt.step()
        self.encoder_opt.step()
        return loss.item()


MOVES = torch.randn(8, 1, 10, 10)


def replay(n=48):
    skill = torch.randn(n, 8)
    obs = torch.randn(n, 1, 10, 10)
    change = torch.einsum("nk,kchw->nchw", skill, MOVES)
    return obs, obs + 0.3 * change, skill


def main(steps=150):
    agent = Agent()
    before = [p.detach().clone() for p in agent.encoder.parameters()]
    for step in range(steps):
        loss = agent.update(*replay())
        if step % 30 == 0 or step == steps - 1:
            moved = max(
                (p - b).abs().max().item() for p, b in zip(agent.encoder.parameters(), before)
            )
            print(f"step {step:3d} loss {loss:.4f} encoder moved {moved:.4f}")


main()
