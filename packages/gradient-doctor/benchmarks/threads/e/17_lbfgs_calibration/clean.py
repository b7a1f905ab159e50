import torch
from torch import nn, optim

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

# resistance of a thermistor against temperature, with instrument noise
celsius = torch.linspace(-10, 80, 120).unsqueeze(1)
kelvin = celsius + 273.15
ohm = 10_000 * torch.exp(3950 * (1 / kelvin - 1 / 298.15))
x = (ohm.log() - ohm.log().mean()) / ohm.log().std()
y = (celsius + 0.05 * torch.randn_like(celsius)) / 50


class Calibration(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.lin = nn.Linear(1, 1)
        self.correction = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.lin(x) + self.correction(x)


model = Calibration()
optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=10, line_search_fn="strong_wolfe")
criterion = nn.MSELoss()

for sweep in range(10):

    def closure():
        optimizer.zero_grad()
        pred = model(x)
        loss = criterion(pred, y)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    print(f"sweep {sweep} mse before {first.item():.3e} error {50 * first.item() ** 0.5:.3f} K")
