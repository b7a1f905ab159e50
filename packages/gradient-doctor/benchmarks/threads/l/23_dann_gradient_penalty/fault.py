import torch
import torch.nn.functional as F
from torch import autograd, nn

torch.manual_seed(0)
N_DOMAINS, N_CLASSES, DIM, PER_DOMAIN = 3, 4, 12, 24
class_means = torch.randn(N_CLASSES, DIM)
domain_shift = torch.randn(N_DOMAINS, DIM) * 1.5


def minibatches():
    out = []
    for d in range(N_DOMAINS):
        y = torch.randint(0, N_CLASSES, (PER_DOMAIN,))
        out.append((class_means[y] + domain_shift[d] + 0.4 * torch.randn(PER_DOMAIN, DIM), y))
    return out


class DANN(nn.Module):
    def __init__(self, grad_penalty=10.0, lam=0.3, d_steps_per_g=3):
        super().__init__()
        self.featurizer = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 16))
        self.classifier = nn.Linear(16, N_CLASSES)
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, N_DOMAINS))
        self.disc_opt = torch.optim.Adam(self.discriminator.parameters(), lr=3e-3)
        self.gen_opt = torch.optim.Adam([*self.featurizer.parameters(), *self.classifier.parameters()], lr=1e-3)
        self.grad_penalty, self.lam, self.d_steps = grad_penalty, lam, d_steps_per_g
        self.update_count = 0

    def update(self, batches):
        self.update_count += 1
        all_x = torch.cat([x for x, _ in batches])
        all_y = torch.cat([y for _, y in batches])
        all_z = self.featurizer(all_x)
        disc_input = all_z
        disc_out = self.discriminator(disc_input)
        disc_labels = torch.cat([torch.full((len(x),), i) for i, (x, _) in enumerate(batches)])
        disc_loss = F.cross_entropy(disc_out, disc_labels)

        disc_softmax = F.softmax(disc_out, dim=1)
        input_grad = autograd.grad(disc_softmax[:, disc_labels].sum(), [disc_input], create_graph=True)[0]
        penalty = (input_grad ** 2).sum(dim=1).mean(dim=0)
        disc_loss = disc_loss + self.grad_penalty * penalty

        if self.update_count % (1 + self.d_steps) < self.d_steps:
            self.disc_opt.zero_grad()
            disc_loss.backward()
            self.disc_opt.step()
            return {"disc_loss": disc_loss.item(), "penalty": penalty.item()}
        class_loss = F.cross_entropy(self.classifier(all_z), all_y)
        self.disc_opt.zero_grad()
        self.gen_opt.zero_grad()
        (class_loss - self.lam * disc_loss).backward()
        self.gen_opt.step()
        return {"class_loss": class_loss.item()}


algorithm = DANN()
log = {}
for step in range(1, 401):
    log.update(algorithm.update(minibatches()))
    if step % 80 == 0:
        print(f"step {step}  " + "  ".join(f"{k} {v:.3e}" for k, v in log.items()))
