import torch
import torch.nn as nn

torch.manual_seed(12)
OBS, ACTIONS, CLIP = 4, 3, 0.2


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBS, 64), nn.Tanh(), nn.Linear(64, ACTIONS))

    def dist(self, obs):
        return torch.distributions.Categorical(logits=self.net(obs))


def gather(policy, n=256):
    obs = torch.randn(n, OBS)
    with torch.no_grad():
        d = policy.dist(obs)
        act = d.sample()
        logp = d.log_prob(act)
    best = obs[:, :ACTIONS].argmax(1)
    rew = (act == best).float() + 1.5 * torch.randn(n)
    return obs, act, logp, rew


class PPO:
    def __init__(self, policy, epochs=20):
        self.policy = policy
        self.epochs = epochs
        self.opt = torch.optim.Adam(policy.parameters(), lr=3e-3)

    def policy_loss(self, ratio, adv):
        clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP)
        return torch.min(-ratio * adv, -clipped * adv).mean()

    def learn(self, obs, act, old_logp, rew):
        adv = (rew - rew.mean()) / (rew.std() + 1e-8)
        for _ in range(self.epochs):
            ratio = (self.policy.dist(obs).log_prob(act) - old_logp).exp()
            loss = self.policy_loss(ratio, adv)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
        return loss.item(), ratio.max().item()


policy = Policy()
agent = PPO(policy)
for it in range(41):
    obs, act, logp, rew = gather(policy)
    loss, biggest = agent.learn(obs, act, logp, rew)
    if it % 8 == 0:
        with torch.no_grad():
            test = torch.randn(2000, OBS)
            d = policy.dist(test)
            p_best = d.probs.gather(1, test[:, :ACTIONS].argmax(1, keepdim=True)).mean().item()
        print(f"{it:3d} loss {loss:.3f} largest ratio {biggest:.2f} p(best) {p_best:.3f} entropy {d.entropy().mean():.3f}")
