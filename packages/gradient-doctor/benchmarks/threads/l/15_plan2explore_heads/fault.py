import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
OBS, ACT, STATE, T = 16, 2, 8, 10


class WorldModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(OBS, 32), nn.ELU(), nn.Linear(32, STATE))
        self.rnn = nn.GRUCell(STATE + ACT, STATE)
        self.decoder = nn.Sequential(nn.Linear(STATE, 32), nn.ELU(), nn.Linear(32, OBS))

    def forward(self, obs, act):
        h, states = torch.zeros(obs.shape[0], STATE), []
        for t in range(obs.shape[1]):
            h = self.rnn(torch.cat([self.encoder(obs[:, t]), act[:, t]], dim=-1), h)
            states.append(h)
        return torch.stack(states, dim=1)


class Plan2Explore:
    """Exploration with a world model that is learned without a task, plus a reward head."""

    def __init__(self):
        self.model = WorldModel()
        self.reward_predictor = nn.Sequential(nn.Linear(STATE, 32), nn.ELU(), nn.Linear(32, 1))
        self.model_params = [*self.model.parameters(), *self.reward_predictor.parameters()]
        self.model_optimizer = torch.optim.Adam(self.model_params, lr=3e-3)

    def model_update(self, obs, act, reward):
        states = self.model(obs[:, :-1], act)
        recon_loss = F.mse_loss(self.model.decoder(states), obs[:, 1:])
        predicted = self.reward_predictor(states).squeeze(-1)
        reward_loss = F.mse_loss(predicted, reward)
        self.model_optimizer.zero_grad()
        (recon_loss + reward_loss).backward()
        nn.utils.clip_grad_norm_(self.model_params, 100.0)
        self.model_optimizer.step()
        return recon_loss.item(), reward_loss.item()


readout = torch.randn(4, OBS)
push = torch.randn(ACT, 4) * 0.5
rotation = torch.linalg.qr(torch.randn(4, 4))[0]


def explore(n=32):
    s = torch.randn(n, 4)
    obs, acts, rewards = [torch.tanh(s @ readout)], [], []
    for _ in range(T):
        a = torch.randn(n, ACT)
        s = s @ rotation * 0.95 + a @ push
        obs.append(torch.tanh(s @ readout))
        acts.append(a)
        rewards.append(20.0 * (s[:, 0] > 1.0).float())
    return torch.stack(obs, 1), torch.stack(acts, 1), torch.stack(rewards, 1)


agent = Plan2Explore()
for step in range(1, 301):
    recon, rew = agent.model_update(*explore())
    if step % 50 == 0:
        print(f"step {step}  next observation mse {recon:.4f}  reward mse {rew:.3f}")
