import argparse
import torch
import torch.nn as nn


class DualSpeaker(nn.Module):
    """Predicts blendshapes of speaker A from both audio tracks."""

    def __init__(self, audio_dim=8, dim=32, shapes=10):
        super().__init__()
        self.own = nn.GRU(audio_dim, dim, batch_first=True)
        self.other = nn.GRU(audio_dim, dim, batch_first=True)
        self.out = nn.Sequential(nn.Linear(2 * dim, dim), nn.GELU(), nn.Linear(dim, shapes))

    def forward(self, own, other):
        a, _ = self.own(own)
        b, _ = self.other(other)
        return self.out(torch.cat([a, b], -1))


class Conversations(torch.utils.data.Dataset):
    def __init__(self, n=128, frames=8, audio_dim=8, shapes=10):
        g = torch.Generator().manual_seed(0)
        self.own = torch.randn(n, frames, audio_dim, generator=g)
        self.other = torch.randn(n, frames, audio_dim, generator=g)
        w1 = torch.randn(audio_dim, shapes, generator=g) / 3
        w2 = torch.randn(audio_dim, shapes, generator=g) / 6
        self.target = torch.tanh(self.own @ w1 + self.other @ w2) + 0.3 * torch.randn(n, frames, shapes, generator=g)

    def __len__(self):
        return len(self.own)

    def __getitem__(self, i):
        return self.own[i], self.other[i], self.target[i]


def trainer(args, train_loader, model, optimizer, criterion):
    for epoch in range(args.max_epoch):
        model.train()
        loss_log = []
        for i, (own, other, target) in enumerate(train_loader, start=1):
            loss = criterion(model(own, other), target)
            optimizer.zero_grad()
            loss.backward()
            loss_log.append(loss.item())
            if i % args.gradient_accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}  train loss {sum(loss_log) / len(loss_log):.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--max_epoch", type=int, default=5)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(Conversations(), batch_size=1, shuffle=True)
    model = DualSpeaker()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    trainer(args, loader, model, optimizer, nn.MSELoss())


if __name__ == "__main__":
    main()
