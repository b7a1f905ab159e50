import torch
import torch.nn as nn

torch.manual_seed(17)


class Field(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.net(x)


def gradient(y, x):
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


def output_fn(field, x):
    """Adds the flux and the residual of u'' = -pi^2 sin(pi x) to the outputs."""
    x = x.clone().requires_grad_(True)
    u = field(x)
    flux = gradient(u, x)
    residual = gradient(flux, x) + torch.pi ** 2 * torch.sin(torch.pi * x)
    return {"u": u, "flux": flux, "residual": residual}


class Trainer:
    def __init__(self, max_epochs, steps_per_epoch=40, inference_mode=True):
        self.max_epochs, self.steps = max_epochs, steps_per_epoch
        self.inference_mode = inference_mode

    def fit(self, field, optimizer):
        boundary = torch.tensor([[0.0], [1.0]])
        for epoch in range(self.max_epochs):
            field.train()
            for _ in range(self.steps):
                out = output_fn(field, torch.rand(64, 1))
                loss = out["residual"].pow(2).mean() + 20.0 * field(boundary).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch} train loss {loss.item():.4f}", flush=True)
            self.validate(field)

    def validate(self, field):
        field.eval()
        x = torch.linspace(0, 1, 101).unsqueeze(1)
        context = torch.inference_mode() if self.inference_mode else torch.enable_grad()
        with context:
            out = output_fn(field, x)
        error = (out["u"] - torch.sin(torch.pi * x)).abs().max().item()
        print(f"        max error {error:.4f}  residual {out['residual'].abs().mean().item():.4f}")


field = Field()
optimizer = torch.optim.Adam(field.parameters(), lr=5e-3)
trainer = Trainer(max_epochs=10)
trainer.fit(field, optimizer)
