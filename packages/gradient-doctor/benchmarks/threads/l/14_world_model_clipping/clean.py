import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
STATE, ACTION, HORIZON = 6, 2, 8
A = torch.linalg.qr(torch.randn(STATE, STATE))[0] * 0.98
B = 0.3 * torch.randn(ACTION, STATE)


class WorldModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(STATE + ACTION, 64), nn.Tanh(), nn.Linear(64, STATE))

    def rollout(self, s, actions):
        preds = []
        for a in actions.unbind(1):
            s = s + self.net(torch.cat([s, a], dim=-1))
            preds.append(s)
        return torch.stack(preds, 1)


class Module(nn.Module):
    def __init__(self, lr=0.05, gradient_clip_norm=0.5):
        super().__init__()
        self.model = WorldModel()
        self.lr, self.gradient_clip_norm = lr, gradient_clip_norm

    def training_step(self, batch):
        s0, actions, future = batch
        loss = F.mse_loss(self.model.rollout(s0, actions), future)
        return loss

    def configure_gradient_clipping(self, optimizer):
        nn.utils.clip_grad_norm_(self.model.parameters(), self.gradient_clip_norm)

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=0.9)


class Trainer:
    def fit(self, module, steps):
        optimizer = module.configure_optimizers()
        running = 0.0
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            loss = module.training_step(make_batch())
            loss.backward()
            module.configure_gradient_clipping(optimizer)
            optimizer.step()
            running += loss.item() / 25
            if step % 25 == 0:
                print(f"step {step}  prediction loss {running:.4f}")
                running = 0.0


def make_batch(n=32):
    s = torch.randn(n, STATE)
    s[torch.rand(n) < 0.02] *= 6.0
    actions = torch.randn(n, HORIZON, ACTION)
    s0, future = s, []
    for t in range(HORIZON):
        s = s @ A + actions[:, t] @ B
        future.append(s)
    return s0, actions, torch.stack(future, 1)


Trainer().fit(Module(), steps=150)
