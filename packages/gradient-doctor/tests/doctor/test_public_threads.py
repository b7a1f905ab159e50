"""Rules that public threads taught, on scripts of their own, and clean relatives of each."""

import pytest

from doctor.snippets import look, nothing, only, serious

STEP = """
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
ACTOR_CRITIC = """
actor = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2), nn.Tanh())
critic = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 1))
of_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
for step in range(4):
    s, a, r = torch.randn(16, 5), torch.randn(16, 2), torch.randn(16, 1)
    of_actor.zero_grad()
    of_critic.zero_grad()
"""
GAN = """
maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
judge = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Linear(8, 1))
of_maker = torch.optim.Adam(maker.parameters(), lr=1e-3)
of_judge = torch.optim.Adam(judge.parameters(), lr=1e-3)
bce = F.binary_cross_entropy_with_logits
ones, zeros = torch.ones(16, 1), torch.zeros(16, 1)
for step in range(4):
    real, fake = torch.randn(16, 3) + 2, maker(torch.randn(16, 4))
    of_maker.zero_grad()
    of_judge.zero_grad()
"""
POLICY = """
policy, value = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=1e-3)
for step in range(4):
    x, returns = torch.randn(16, 4), 5 + torch.rand(16)
    law = Categorical(logits=policy(x))
    action = law.sample()
"""
LEARNER = """
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
"""
TEXT = """
embed, head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 2)
optimizer = torch.optim.Adam([*embed.parameters(), *head.parameters()], lr=1e-2)
for step in range(4):
    lengths, ids = torch.randint(1, 10, (8,)), torch.randint(1, 20, (8, 10))
    ids[torch.arange(10)[None] >= lengths[:, None]] = 0
    keep = (ids != 0).float().unsqueeze(-1)
    {pooled}
    loss = F.cross_entropy(head(pooled), (ids[:, 0] > 10).long())
"""
LOW_RANK = """
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.a = nn.Parameter(torch.{a}(6, 2))  # FAULT
        self.b = nn.Parameter(torch.zeros(2, 6))
    def forward(self, x):
        return self.base(x) + x @ self.a @ self.b
layer = Layer()
optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
for step in range(4):
    x = torch.randn(8, 6)
    loss = F.mse_loss(layer(x), x.flip(1))
"""
NORMED = """
class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(5, width)
        self.norm = nn.{norm}  # FAULT
        self.last = nn.Linear(width, 1)
    def forward(self, x):
        return self.last(self.norm(self.first(x)))
net = Net({width})
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(4):
    x = torch.randn(8, 5)
    loss = F.mse_loss(net(x), x[:, :1])
"""
EPOCHS = """
critic, policy = nn.Linear(4, 1), nn.Linear(4, 2)
optimizer = torch.optim.Adam([*critic.parameters(), *policy.parameters()], lr=1e-3)
def update(x, action, reward):
    gap = (reward - critic(x).squeeze(-1)){detached}  # FAULT
    for epoch in range(3):
        chosen = Categorical(logits=policy(x)).log_prob(action)
        loss = -(chosen * gap).mean() + critic(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
for step in range(3):
    update(torch.randn(16, 4), torch.randint(2, (16,)), torch.randn(16))
"""
STATE = """
class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out, self.state = nn.GRUCell(4, 8), nn.Linear(8, 1), torch.zeros(1, 8)
    def forward(self, x):
        new = self.cell(x, self.state)
        self.state = (new * 1.0){detached}  # FAULT
        return self.out(new)
memory = Memory()
optimizer = torch.optim.SGD(memory.parameters(), lr=0.01)
for step in range(4):
    loss = (memory(torch.randn(1, 4)) - 1).square().mean()
"""
GROWN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.parts = nn.Linear(6, 8), nn.ModuleDict()
    def grow(self):
        self.parts["task"] = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))  # FAULT
    def forward(self, x):
        return self.parts["task"](self.body(x))
net = Net()
{early}
net.grow()
for p in net.body.parameters():
    p.requires_grad_(False)
{late}
for step in range(4):
    x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
    loss = F.cross_entropy(net(x), y)
"""
MASKED = """
q, k, v, out = (nn.Linear(8, 8) for _ in range(4))
optimizer = torch.optim.Adam([p for m in (q, k, v, out) for p in m.parameters()], lr=1e-2)
for step in range(4):
    lengths = torch.tensor([{least}, 2, 3, 4, 5, 5])
    x, keep = torch.randn(6, 5, 8), torch.arange(5)[None] < lengths[:, None]
    scores = (q(x) @ k(x).transpose(1, 2))
    scores = scores.masked_fill(~keep[:, None, :], float("-inf"))  # FAULT
    mixed = scores.softmax(-1)
    logits = out(x + mixed @ v(x))
    loss = F.cross_entropy(logits[keep], (x[..., 0] > 0).long()[keep])
"""

FAULTS = {
    "critic-steps-on-the-policys-loss": (
        30,
        ACTOR_CRITIC
        + """
    (-critic(torch.cat([s, actor(s)], 1)).mean()).backward()  # FAULT
    F.mse_loss(critic(torch.cat([s, a], 1)), r).backward()
    of_critic.step()
    of_actor.step()
""",
    ),
    "both-losses-in-one-backward": (
        30,
        ACTOR_CRITIC
        + """
    fit = F.mse_loss(critic(torch.cat([s, a], 1)), r)
    (fit - critic(torch.cat([s, actor(s)], 1)).mean()).backward()  # FAULT
    of_critic.step()
    of_actor.step()
""",
    ),
    "judge-steps-on-the-makers-loss": (
        30,
        GAN
        + """
    (bce(judge(real), ones) + bce(judge(fake.detach()), zeros)).backward()
    bce(judge(fake), ones).backward()  # FAULT
    of_judge.step()
    of_maker.step()
""",
    ),
    "positive-advantage-with-a-gradient": (
        30,
        POLICY
        + """
    gap = (returns - value(x).squeeze(-1)) / 3  # FAULT
    loss = -(law.log_prob(action) * gap).mean() + F.mse_loss(value(x).squeeze(-1), returns)
"""
        + STEP,
    ),
    "target-with-a-gradient": (
        30,
        POLICY
        + """
    target = returns + 0.9 * value(x.flip(0)).squeeze(-1)  # FAULT
    loss = F.mse_loss(value(x).squeeze(-1), target) - law.log_prob(action).mean()
"""
        + STEP,
    ),
    "ratio-to-itself": (
        20,
        """
policy = nn.Linear(4, 3)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for step in range(4):
    x, action, gap = torch.randn(16, 4), torch.randint(3, (16,)), torch.randn(16)
    new = Categorical(logits=policy(x)).log_prob(action)
    old = Categorical(logits=policy(x)).log_prob(action)  # FAULT
    loss = -((new - old).exp() * gap).mean()
"""
        + STEP,
    ),
    "log-probability-driven-down": (
        32,
        LEARNER
        + "    loss = model(x).log_softmax(1).gather(1, y[:, None]).mean()  # FAULT\n"
        + STEP,
    ),
    "micro-batches-added-up": (
        22,
        LEARNER
        + """
    optimizer.zero_grad()
    for part in range(4):
        x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
        F.cross_entropy(model(x), y).backward()  # FAULT
    optimizer.step()
""",
    ),
    "sum-that-overflows": (
        22,
        """
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(60):
    x = torch.randn(256, 4)
    loss = (model(x) - x[:, :1]).square().sum()  # FAULT
"""
        + STEP,
    ),
    "optimizer-made-anew": (
        8,
        """
model = nn.Linear(4, 3)
for step in range(8):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)  # FAULT
    loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
"""
        + STEP,
    ),
    "plain-tensor-of-a-module": (
        7,
        """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = torch.ones(4, requires_grad=True)  # FAULT
    def forward(self, x):
        return (self.layer(x) * self.scale).sum(1)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(6):
    x = torch.randn(8, 4)
    loss = (net(x) - x.sum(1)).square().mean()
"""
        + STEP,
    ),
    "part-added-after-the-optimizer": (
        7,
        GROWN.format(early="optimizer = torch.optim.SGD(net.parameters(), lr=0.1)", late="") + STEP,
    ),
    "relu-before-the-loss": (
        20,
        LEARNER + "    loss = F.cross_entropy(torch.relu(model(x)), y)  # FAULT\n" + STEP,
    ),
    "mean-with-padding": (19, TEXT.format(pooled="pooled = embed(ids).mean(1)  # FAULT") + STEP),
    "both-matrices-zero": (20, LOW_RANK.format(a="zeros") + STEP),
    "weights-zeroed-through-data": (
        20,
        LEARNER.replace(
            "optimizer =",
            "for p in model.parameters():\n    p.data.fill_(0.0)  # FAULT\noptimizer =",
        )
        + "    loss = F.cross_entropy(model(x), y)\n"
        + STEP,
    ),
    "layer-norm-of-one": (20, NORMED.format(norm="LayerNorm(width)", width=1) + STEP),
    "group-norm-of-one": (20, NORMED.format(norm="GroupNorm(width, width)", width=4) + STEP),
    "advantage-before-the-epochs": (12, EPOCHS.format(detached="")),
    "state-with-its-graph": (14, STATE.format(detached="") + STEP),
    "row-without-a-key": (27, MASKED.format(least=0) + STEP),
    "updates-without-clearing": (
        28,
        """
weight = torch.randn(4, 1, requires_grad=True)
for step in range(12):
    x = torch.randn(32, 4)
    loss = (x @ weight - x[:, :1]).square().mean()
    loss.backward()  # FAULT
    with torch.no_grad():
        weight -= 0.01 * weight.grad
""",
    ),
    "through-numpy": (
        3,
        """
import numpy
body, head = nn.Linear(4, 4), nn.Linear(4, 1)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)
for step in range(4):
    x = torch.randn(8, 4)
    numbers = body(x).detach().numpy()  # FAULT
    loss = F.mse_loss(head(torch.from_numpy(numpy.sort(numbers, 1))), x[:, :1])
"""
        + STEP,
    ),
    "validation-without-eval": (
        26,
        """
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def validate():
    with torch.no_grad():
        return F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))  # FAULT
for epoch in range(3):
    for step in range(4):
        loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    validate()
""",
    ),
}
CLEAN = {
    "critic-frozen-for-the-policy": ACTOR_CRITIC
    + """
    F.mse_loss(critic(torch.cat([s, a], 1)), r).backward()
    critic.requires_grad_(False)
    (-critic(torch.cat([s, actor(s)], 1)).mean()).backward()
    critic.requires_grad_(True)
    of_critic.step()
    of_actor.step()
""",
    "judge-stepped-first": GAN
    + """
    (bce(judge(real), ones) + bce(judge(fake.detach()), zeros)).backward()
    of_judge.step()
    bce(judge(fake), ones).backward()
    of_maker.step()
""",
    "two-optimizers-of-one-autoencoder": GAN.replace("real, fake", "real, code")
    + """
    F.mse_loss(judge(code), real[:, :1]).backward()
    F.mse_loss(judge(torch.randn(16, 3)), real[:, 1:2]).backward()
    of_judge.step()
    of_maker.step()
""",
    "mixture-weights": """
gate, means = nn.Linear(4, 3), nn.Linear(4, 3)
optimizer = torch.optim.Adam([*gate.parameters(), *means.parameters()], lr=1e-2)
for step in range(4):
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    loss = -(gate(x).softmax(-1) * Normal(means(x), 1.0).log_prob(y)).sum(1).mean()
"""
    + STEP,
    "target-without-a-gradient": POLICY
    + """
    with torch.no_grad():
        target = returns + 0.9 * value(x.flip(0)).squeeze(-1)
    loss = F.mse_loss(value(x).squeeze(-1), target) - law.log_prob(action).mean()
"""
    + STEP,
    "two-views-agree": LEARNER
    + """
    one, two = model(x), model(x + 0.1 * torch.randn(8, 4))
    loss = F.cross_entropy(one, y) + F.mse_loss(one, two)
"""
    + STEP,
    "costs-are-minimised": POLICY
    + """
    cost = returns.clone()
    loss = (law.log_prob(action) * cost).mean() + value(x).square().mean()
"""
    + STEP,
    "micro-batches-divided": LEARNER
    + """
    optimizer.zero_grad()
    for part in range(4):
        (F.cross_entropy(model(torch.randn(8, 4)), y) / 4).backward()
    optimizer.step()
""",
    "gradients-divided": LEARNER
    + """
    optimizer.zero_grad()
    for part in range(4):
        F.cross_entropy(model(torch.randn(8, 4)), y).backward()
    for p in model.parameters():
        p.grad.div_(4)
    optimizer.step()
""",
    "micro-batches-under-adam": LEARNER.replace("optim.SGD", "optim.Adam")
    + """
    optimizer.zero_grad()
    for part in range(4):
        F.cross_entropy(model(torch.randn(8, 4)), y).backward()
    optimizer.step()
""",
    "optimizer-per-phase": """
model = nn.Linear(4, 3)
for phase in range(4):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(3):
        loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
    "part-before-the-optimizer": GROWN.format(
        early="", late="optimizer = torch.optim.SGD(net.parts.parameters(), lr=0.1)"
    )
    + STEP,
    "mean-of-the-tokens": TEXT.format(pooled="pooled = (embed(ids) * keep).sum(1) / keep.sum(1)")
    + STEP,
    "one-matrix-zero": LOW_RANK.format(a="randn") + STEP,
    "layer-norm-of-several": NORMED.format(norm="LayerNorm(width)", width=4) + STEP,
    "advantage-as-a-number": EPOCHS.format(detached=".detach()"),
    "state-without-its-graph": STATE.format(detached=".detach()") + STEP,
    "rows-with-a-key": MASKED.format(least=1) + STEP,
    "training-accuracy": LEARNER.replace("nn.ReLU()", "nn.ReLU(), nn.Dropout()")
    + """
    loss = F.cross_entropy(model(x), y)
    with torch.no_grad():
        print((model(x).argmax(1) == y).float().mean().item())
"""
    + STEP,
    "gradients-of-its-own-making": """
body, heads = nn.Linear(5, 8), nn.Linear(8, 2)
weights = nn.Parameter(torch.ones(2))
of_model = torch.optim.Adam([*body.parameters(), *heads.parameters()], lr=1e-2)
of_weights = torch.optim.Adam([weights], lr=1e-2)
for step in range(4):
    x = torch.randn(16, 5)
    losses = weights * (heads(torch.relu(body(x))) - x[:, :2]).square().mean(0)
    of_model.zero_grad()
    losses.sum().backward(retain_graph=True)
    of_weights.zero_grad()
    norms = [
        torch.autograd.grad(one, body.weight, retain_graph=True, create_graph=True)[0].norm()
        for one in losses
    ]
    balance = (norms[0] - norms[1].detach()).abs() + (norms[1] - norms[0].detach()).abs()
    weights.grad = torch.autograd.grad(balance, weights)[0]
    of_model.step()
    of_weights.step()
""",
}


@pytest.mark.parametrize(("number", "source"), FAULTS.values(), ids=FAULTS)
def test_a_fault(tmp_path, number, source):
    if number == 12:  # that the advantage trains the critic is said besides
        examination, lines = look(tmp_path, source)
        first = serious(examination)[0]
        assert (first.number, first.site.line in lines) == (12, True), first
    else:
        only(tmp_path, source, number)


@pytest.mark.parametrize("source", CLEAN.values(), ids=CLEAN)
def test_a_clean_relative(tmp_path, source):
    nothing(tmp_path, source)


# lengths that come out as 0, in functions that have ended when backward is called (document 000)

LENGTHS = {
    "a number": """
def spans(mask, padded_width):
    kept = []
    for row in mask:
        kept.append(max(0, row.sum().item() - padded_width))  # FAULT
    return kept
""",
    "a number in two lines": """
def spans(mask, padded_width):
    kept = []
    for row in mask:
        length = int(row.sum()) - padded_width  # FAULT
        kept.append(max(length, 0))
    return kept
""",
    "a tensor": """
def spans(mask, padded_width):
    lengths = (mask.sum(1) - padded_width).clamp(min=0)  # FAULT
    return lengths.tolist()
""",
}
EMPTY = """
net, head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 5)
optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
def loss_of(x, mask):
    logits = head(net(x)[0])
    terms = []
    for row, length in zip(logits, spans(mask, 5)):
        if length > 0:
            terms.append(row[-int(length) :].logsumexp(-1).mean())
    return torch.stack(terms).sum() if terms else torch.zeros(())
for width in {widths}:
    x, mask = torch.randn(2, 8, 4), torch.zeros(2, 8, dtype=torch.long)
    mask[:, 8 - width :] = 1
    loss = loss_of(x, mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_an_empty_selection_leads_to_the_arithmetic_of_its_lengths(tmp_path, lengths):
    examination, lines = look(tmp_path, lengths + EMPTY.format(widths=(8, 7, 4)))
    assert isinstance(examination.error, RuntimeError)
    first = examination.findings[0]
    assert (first.number, first.site.line) == (1, lines[0]), first
    assert "count the tokens of the response itself" in first.fix
    nothing(tmp_path, lengths.replace("  # FAULT", "") + EMPTY.format(widths=(8, 7, 8, 6)))


def test_a_hinge_is_no_length(tmp_path):
    """A difference of losses that is cut off at 0 is not why nothing was selected."""
    source = """
net = nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x, chosen = torch.randn(8, 4), torch.full((8,), step < 2)
    loss = torch.zeros(())  # FAULT
    for row in x[chosen]:
        loss = loss + (net(row).mean() - 0.1).clamp(min=0) + (1 - net(row)).relu().mean()
    print(loss.item())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    examination, lines = look(tmp_path, source)
    (finding,) = [f for f in examination.findings if f.number == 1]
    assert finding.site.line == lines[0]
