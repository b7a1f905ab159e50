import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F


class DispNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc1 = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.enc2 = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Conv2d(32, 1, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.enc1(x))
        x = F.relu(self.enc2(x))
        x = F.interpolate(x, scale_factor=2, mode="nearest")
        return F.softplus(self.head(x))


def make_batch(n=8, size=16):
    depth = torch.rand(n, 1, 4, 4) * 3 + 0.5
    depth = F.interpolate(depth, size=(size, size), mode="bilinear", align_corners=False)
    shade = torch.cat([1 / depth, depth / 4, torch.rand_like(depth)], dim=1)
    return shade, depth


def train(args, net, optimizer, scheduler):
    net.train()
    for it in range(args.iters):
        image, depth = make_batch()
        loss = F.l1_loss(net(image), depth)

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()

        if it % 50 == 0 or it == args.iters - 1:
            lr = optimizer.param_groups[0]["lr"]
            print(f"it {it:4d}  lr {lr:.5f}  photometric loss {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, default=250)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--scheduler", choices=["none", "step"], default="step")
    args = parser.parse_args()

    torch.manual_seed(1)
    net = DispNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    scheduler = None
    if args.scheduler == "step":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.5)
    train(args, net, optimizer, scheduler)


if __name__ == "__main__":
    main()
