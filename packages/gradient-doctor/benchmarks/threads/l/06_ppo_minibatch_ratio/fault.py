import torch
from torch import nn

torch.manual_seed(0)
OBS, ACT, BATCH = 5, 4, 512


class PPOLearner:
    def __init__(self, mini_batch_size, clip_range=0.2, ent_coef=0.01):
        torch.manual_seed(3)
        self.policy = nn.Sequential(nn.Linear(OBS, 32), nn.Tanh(), nn.Linear(32, ACT))
        self.value_net = nn.Sequential(nn.Linear(OBS, 32), nn.Tanh(), nn.Linear(32, 1))
        self.policy_optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.3)
        self.value_optimizer = torch.optim.SGD(self.value_net.parameters(), lr=0.02)
        self.value_loss_fn = nn.MSELoss()
        self.mini_batch_size = mini_batch_size
        self.clip_range, self.ent_coef = clip_range, ent_coef

    def learn(self, obs, acts, old_log_probs, returns, advantages):
        self.policy_optimizer.zero_grad()
        self.value_optimizer.zero_grad()
        total = 0.0
        for start in range(0, BATCH, self.mini_batch_size):
            sl = slice(start, start + self.mini_batch_size)
            vals = self.value_net(obs[sl]).squeeze(-1)
            dist = torch.distributions.Categorical(logits=self.policy(obs[sl]))
            ratio = (dist.log_prob(acts[sl]) - old_log_probs[sl]).exp()
            clipped = ratio.clamp(1 - self.clip_range, 1 + self.clip_range)
            policy_loss = -torch.min(ratio * advantages[sl], clipped * advantages[sl]).mean()
            entropy = dist.entropy().mean()

            value_loss = self.value_loss_fn(vals, returns[sl])
            ppo_loss = (policy_loss - entropy * self.ent_coef) * self.mini_batch_size / BATCH
            ppo_loss.backward()
            value_loss.backward()
            total += value_loss.item()
        self.policy_optimizer.step()
        self.value_optimizer.step()
        return total


def collect(learner, goal):
    obs = torch.randn(BATCH, OBS)
    with torch.no_grad():
        dist = torch.distributions.Categorical(logits=learner.policy(obs))
        acts = dist.sample()
        reward = (obs @ goal).gather(1, acts[:, None]).squeeze(1)
        value = learner.value_net(obs).squeeze(-1)
        adv = reward - value
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        return obs, acts, dist.log_prob(acts), reward, adv, value


goal = torch.randn(OBS, ACT)
for mini_batch_size in (512, 128, 32):
    learner = PPOLearner(mini_batch_size)
    torch.manual_seed(11)
    for it in range(21):
        obs, acts, logp, ret, adv, value = collect(learner, goal)
        learner.learn(obs, acts, logp, ret, adv)
        if it % 10 == 0:
            norm = sum(p.grad.pow(2).sum() for p in learner.value_net.parameters()).sqrt().item()
            print(f"minibatch {mini_batch_size:3d}  iter {it:2d}  reward {ret.mean().item():6.3f}  critic mse {(ret - value).pow(2).mean().item():.3f}  critic grad norm {norm:.2f}")
