import torch
import torch.nn as nn

torch.manual_seed(0)
SIZE = 16


class Forward:
    """Undersampled Fourier measurements of a complex image."""

    def __init__(self, keep=0.6):
        self.mask = (torch.rand(SIZE, SIZE) < keep).float()

    def __call__(self, x):
        return torch.fft.fft2(x, norm="ortho") * self.mask

    def adjoint(self, y):
        return torch.fft.ifft2(y * self.mask, norm="ortho")


class Denoiser(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 2, 3, padding=1))

    def forward(self, x):
        pair = torch.stack([x.real, x.imag], 1)
        out = pair + self.net(pair)
        return torch.complex(out[:, 0], out[:, 1])


class UnrolledRecon(nn.Module):
    def __init__(self, operator, iterations=3):
        super().__init__()
        self.A = operator
        self.denoiser = Denoiser()
        self.step = nn.Parameter(torch.tensor(0.5))
        self.iterations = iterations
        self._loss_fun = nn.MSELoss(reduction="sum")

    def forward(self, y):
        x = self.A.adjoint(y)
        for _ in range(self.iterations):
            x = self.denoiser(x - self.step * self.A.adjoint(self.A(x) - y))
        return x

    def loss(self, x_hat, x):
        return self._loss_fun(torch.view_as_real(x_hat), torch.view_as_real(x))


def phantoms(n):
    grid = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, SIZE)] * 2, indexing="ij"))
    image = torch.zeros(n, SIZE, SIZE)
    for _ in range(3):
        center, radius = torch.rand(n, 2, 1, 1) * 1.2 - 0.6, torch.rand(n, 1, 1) * 0.4 + 0.2
        image = image + ((grid - center).pow(2).sum(1).sqrt() < radius).float() * torch.rand(n, 1, 1)
    return torch.complex(image, torch.zeros_like(image))


def train(batch_size, steps=61, lr=2e-4):
    torch.manual_seed(1)
    operator = Forward()
    model = UnrolledRecon(operator)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        x = phantoms(batch_size)
        x_hat = model(operator(x))
        loss = model.loss(x_hat, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            error = (x_hat - x).abs().pow(2).mean()
            print(f"batch size {batch_size}  step {step:2d}  mse {error.item():.5f}")


for batch_size in (1, 8):
    train(batch_size)
