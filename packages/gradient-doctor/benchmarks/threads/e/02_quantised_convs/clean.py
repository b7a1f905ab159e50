import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(1)


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, bits):
        step = w.abs().max() / (2 ** (bits - 1) - 1)
        return torch.round(w / step) * step

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Conv2dQ(nn.Conv2d):
    bits = 4

    @classmethod
    def from_float(cls, conv):
        q = cls(conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding,
                bias=conv.bias is not None)
        q.load_state_dict(conv.state_dict())
        return q

    def forward(self, x):
        return self._conv_forward(x, RoundSTE.apply(self.weight, self.bits), self.bias)


def replace_conv_recursively(module):
    for name, child in module.named_children():
        if isinstance(child, nn.Conv2d):
            setattr(module, name, Conv2dQ.from_float(child))
        else:
            replace_conv_recursively(child)


def build():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )


def gratings(n=48):
    label = torch.randint(0, 4, (n,))
    grid = torch.arange(12.0)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    angle = label * torch.pi / 4
    wave = xx * torch.cos(angle)[:, None, None] + yy * torch.sin(angle)[:, None, None]
    return torch.sin(1.4 * wave + 6.28 * torch.rand(n, 1, 1)).unsqueeze(1), label


def main(iters=160):
    model = build()
    criterion = nn.CrossEntropyLoss()

    # prepare quantisation-aware training
    replace_conv_recursively(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    model.train()
    for i in range(iters):
        image, label = gratings()
        output = model(image)
        loss = criterion(output, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 40 == 0 or i == iters - 1:
            acc = (output.argmax(1) == label).float().mean()
            print(f"[{i:3d}/{iters}] loss {loss.item():.4f} acc {acc.item():.2f}")


if __name__ == "__main__":
    main()
