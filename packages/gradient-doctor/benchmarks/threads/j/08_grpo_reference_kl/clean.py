import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, LENGTH, GROUP = 12, 6, 16


class Policy(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.emb = nn.Embedding(VOCAB + 1, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, VOCAB)

    def logits(self, tokens):
        start = torch.full((tokens.size(0), 1), VOCAB)
        h, _ = self.rnn(self.emb(torch.cat([start, tokens[:, :-1]], 1)))
        return self.out(h)

    def log_probs(self, tokens):
        return F.log_softmax(self.logits(tokens), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    @torch.no_grad()
    def generate(self, n):
        tokens = torch.zeros(n, LENGTH, dtype=torch.long)
        for t in range(LENGTH):
            p = self.logits(tokens)[:, t].softmax(-1)
            tokens[:, t] = torch.multinomial(p, 1).squeeze(1)
        return tokens


def reward_fn(tokens):
    return (tokens == 3).float().mean(1) + 0.5 * (tokens[:, -1] == 7).float()


def low_var_kl(logp, ref_logp):
    diff = ref_logp - logp
    return torch.clamp(diff.exp() - diff - 1, -10, 10)


def update_policy(actor, ref, optimizer, tokens, old_logp, adv, kl_coef=0.5, clip=0.2):
    with torch.no_grad():
        ref_logp = ref.log_probs(tokens)
    for _ in range(2):
        logp = actor.log_probs(tokens)
        ratio = (logp - old_logp).exp()
        a = adv.unsqueeze(1)
        pg_loss = -torch.min(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a).mean()
        kl_loss = low_var_kl(logp, ref_logp).mean()
        policy_loss = pg_loss + kl_loss * kl_coef
        optimizer.zero_grad()
        policy_loss.backward()
        optimizer.step()
    return pg_loss.item(), kl_loss.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    actor = Policy()
    ref = copy.deepcopy(actor).requires_grad_(False)
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
    for step in range(1, 81):
        tokens = actor.generate(4 * GROUP)
        reward = reward_fn(tokens).view(4, GROUP)
        adv = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).flatten()
        old_logp = actor.log_probs(tokens).detach()
        pg, kl = update_policy(actor, ref, optimizer, tokens, old_logp, adv)
        if step % 20 == 0:
            print(f"step {step}  reward {reward.mean():.3f}  pg {pg:+.4f}  kl to reference {kl:.3f}")
