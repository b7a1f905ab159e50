import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

torch.manual_seed(0)
batch_size, k_shift, lr_decay_step, total_itr = 60, 10, 30, 360


class GoNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(20, 64), nn.ReLU())
        self.regressor = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, prev, curr):
        return self.regressor(torch.cat([self.features(prev), self.features(curr)], 1))


LOOK = torch.randn(4, 20)


def video_pair():
    """One pair of frames, and k_shift random crops of it."""
    box = torch.rand(k_shift + 1, 4) * 2 - 1
    crops = torch.tanh(box @ LOOK) + 0.02 * torch.randn(k_shift + 1, 20)
    shifted = box[1:] - box[:1]
    return crops[:1].expand(k_shift, -1), crops[1:], shifted


def make_transformed_samples():
    while True:
        yield video_pair()


def train_model(model, criterion, optimizer, scheduler):
    itr, window, running = 0, [], []
    for prev, curr, box in make_transformed_samples():
        window.append((prev, curr, box))
        collected = sum(len(b) for _, _, b in window)
        done = collected >= batch_size
        if done:
            x1, x2, y = (torch.cat(t) for t in zip(*window))
            window = []
            optimizer.zero_grad()
            loss = criterion(model(x1, x2), y)
            loss.backward()
            optimizer.step()
            running.append(loss.item())
            itr += 1
            if itr % 60 == 0:
                mean = sum(running[-20:]) / 20
                print(f"[training] step = {itr}/{total_itr}, loss = {mean:.4f}, lr = {scheduler.get_last_lr()[0]:.2e}")
        if done and itr % lr_decay_step == 0:
            scheduler.step()
        if itr == total_itr:
            return model


net = GoNet()
loss_fn = nn.L1Loss()
optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
scheduler = StepLR(optimizer, step_size=1, gamma=0.8)
train_model(net, loss_fn, optimizer, scheduler)
