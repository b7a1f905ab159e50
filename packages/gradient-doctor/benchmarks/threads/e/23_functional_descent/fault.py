import torch
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(0)


def extract(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def example_loss(params, model, x, y):
    out = functional_call(model, params, (x.unsqueeze(0),))
    return nn.functional.mse_loss(out.squeeze(0), y)


def clipped_gradient(params, model, xs, ys, bound=2.0):
    """mean of the per-example gradients, each clipped in norm"""
    per_example = vmap(grad(example_loss), in_dims=(None, None, 0, 0))(params, model, xs, ys)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in per_example.values()]).norm(dim=0)
    scale = (bound / (norms + 1e-8)).clamp(max=1.0)
    return {k: torch.einsum("b,b...->...", scale, g) / len(xs) for k, g in per_example.items()}


def descend(params, gradient, velocity, lr, momentum=0.9):
    for name, g in gradient.items():
        velocity[name].mul_(momentum).add_(g)
        params[name].sub_(velocity[name], alpha=lr)


def pendulum(n):
    state = torch.empty(n, 2).uniform_(-2, 2)
    accel = -torch.sin(state[:, 0]) - 0.1 * state[:, 1]
    return state, torch.stack([state[:, 1], accel], 1)


model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
params = extract(model)
velocity = {k: torch.zeros_like(v) for k, v in params.items()}
held_x, held_y = pendulum(500)

for it in range(251):
    xs, ys = pendulum(64)
    descend(params, clipped_gradient(params, model, xs, ys), velocity, lr=0.02)
    if it % 50 == 0:
        with torch.no_grad():
            held = nn.functional.mse_loss(model(held_x), held_y)
        print(f"it {it} held-out error {held.item():.4f}")

state, path = torch.tensor([[1.0, 0.0]]), []
with torch.no_grad():
    for _ in range(100):
        state = state + 0.05 * model(state)
        path.append(state[0, 0].item())
print(f"angle after 5 s: {path[-1]:.3f}")
