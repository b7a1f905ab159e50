import torch
import torch.nn.functional as F

torch.manual_seed(0)


def init(*shapes):
    return [(torch.randn(*s) * 0.3).requires_grad_() for s in shapes]


class MetaLearner:
    """Representation (rln) is meta-learned, prediction head (pln) adapts in the inner loop."""

    def __init__(self, width=32, inner_lr=0.05):
        self.rln = init((1, width), (width,), (width, width), (width,))
        self.pln = init((width, 1), (1,))
        self.inner_lr = inner_lr
        self.opt = torch.optim.Adam(self.rln + self.pln, lr=3e-3)

    def forward(self, x, rln, pln):
        h = torch.tanh(x @ rln[0] + rln[1])
        h = torch.tanh(h @ rln[2] + rln[3])
        return h @ pln[0] + pln[1]

    def inner_update(self, x, fast, y):
        loss = F.mse_loss(self.forward(x, self.rln, fast), y)
        grad = torch.autograd.grad(loss, fast, create_graph=True)
        return [w - self.inner_lr * g for w, g in zip(fast, grad)]

    def meta_step(self, tasks, inner_steps=5):
        meta_loss = 0.0
        for xs, ys, xq, yq in tasks:
            fast = list(self.pln)
            for _ in range(inner_steps):
                fast = self.inner_update(xs, fast, ys)
            meta_loss = meta_loss + F.mse_loss(self.forward(xq, self.rln, fast), yq)
        meta_loss = meta_loss / len(tasks)
        self.opt.zero_grad()
        meta_loss.backward()
        self.opt.step()
        return meta_loss.item()


def sample_task(k=10):
    amp, phase = torch.rand(1) * 2 + 0.5, torch.rand(1) * 3.14
    xs, xq = torch.rand(k, 1) * 6 - 3, torch.rand(k, 1) * 6 - 3
    return xs, amp * torch.sin(xs + phase), xq, amp * torch.sin(xq + phase)


learner = MetaLearner()
window = []
for it in range(300):
    window.append(learner.meta_step([sample_task() for _ in range(4)]))
    if it % 60 == 59:
        print(f"iter {it + 1}: query loss {sum(window[-60:]) / 60:.3f}")
