import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import grad


def gradient_penalty(critic, h_s, h_t):
    alpha = torch.rand(h_s.size(0), 1)
    differences = h_t - h_s
    interpolates = h_s + alpha * differences
    interpolates = torch.cat([interpolates, h_s, h_t]).requires_grad_()

    preds = critic(interpolates)
    gradients = grad(preds, interpolates, grad_outputs=torch.ones_like(preds),
                     retain_graph=True, create_graph=True)[0]
    gradient_norm = gradients.norm(2, dim=1)
    return ((gradient_norm - 1) ** 2).mean()


def loop_domains(batch=32, shift=2.5):
    while True:
        y = torch.randint(0, 2, (batch,))
        xs = torch.randn(batch, 6) * 0.5
        xs[:, :2] += (2.0 * y - 1).unsqueeze(1)
        yt = torch.randint(0, 2, (batch,))
        xt = torch.randn(batch, 6) * 0.5
        xt[:, :2] += (2.0 * yt - 1).unsqueeze(1)
        xt[:, 0] += shift
        yield (xs, y), (xt, yt)


def main(critic_steps=5, gamma=10.0, wd_weight=1.0):
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8))
    discriminator = nn.Linear(8, 2)
    critic = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    critic_optim = torch.optim.Adam(critic.parameters(), lr=2e-3)
    clf_optim = torch.optim.Adam([*features.parameters(), *discriminator.parameters()], lr=2e-3)
    batches = loop_domains()

    for it in range(1, 121):
        (xs, ys), (xt, yt) = next(batches)
        with torch.no_grad():
            h_s, h_t = features(xs), features(xt)
        for _ in range(critic_steps):
            gp = gradient_penalty(critic, h_s, h_t)
            wasserstein = critic(h_s).mean() - critic(h_t).mean()
            critic_cost = -wasserstein + gamma * gp
            critic_optim.zero_grad()
            critic_cost.backward()
            critic_optim.step()

        f_s, f_t = features(xs), features(xt)
        clf_loss = F.cross_entropy(discriminator(f_s), ys)
        distance = critic(f_s).mean() - critic(f_t).mean()
        loss = clf_loss + wd_weight * distance
        clf_optim.zero_grad()
        loss.backward()
        clf_optim.step()
        if it % 30 == 0:
            acc = (discriminator(f_t).argmax(1) == yt).float().mean().item()
            print(f"it {it}  clf {clf_loss.item():.3f}  distance {distance.item():.3f}  "
                  f"penalty {gp.item():.3f}  target acc {acc:.2f}")


if __name__ == "__main__":
    main()
