import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(16)
STATE, ACTION, HID = 12, 4, 64
BFLOAT_ENABLE = True


class WorldModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(STATE + ACTION, HID)
        self.mid = nn.Linear(HID, HID)
        self.out = nn.Linear(HID, STATE)

    def forward(self, state, action):
        h = F.silu(self.inp(torch.cat([state, action], dim=-1)))
        return self.out(F.silu(self.mid(h)))


def compute_loss(model, batch):
    state, action, nxt = batch
    return F.mse_loss(model(state, action), nxt)


def train_step(model, opt, batch):
    if BFLOAT_ENABLE:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = compute_loss(model, batch)
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        opt.step()
    else:
        loss = compute_loss(model, batch)
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        opt.step()
    return loss.item(), norm.item()


def main():
    a = torch.randn(STATE, STATE) / STATE ** 0.5
    b = torch.randn(ACTION, STATE)
    model = WorldModel()
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(30):
        state, action = torch.randn(64, STATE), torch.randn(64, ACTION)
        batch = (state, action, state @ a + action @ b)
        loss, norm = train_step(model, opt, batch)
        if step % 4 == 0:
            print(f"step {step} loss {loss:.4f} grad norm {norm:.3f}")


if __name__ == "__main__":
    main()
