"""Right loops of many kinds: not one of them may give a warning, in any mode."""

import pytest

from doctor.snippets import nothing

NETWORKS = """
G = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
D = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
"""
LOOPS = {
    "lbfgs": """
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
def closure():
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss
for step in range(4):
    optimizer.step(closure)
""",
    "optimizer-in-backward": """
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
def hook(p):
    optimizers[p].step()
    optimizers[p].zero_grad()
for p in net.parameters():
    p.register_post_accumulate_grad_hook(hook)
for step in range(4):
    F.cross_entropy(net(torch.randn(8, 4)), torch.randint(0, 3, (8,))).backward()
""",
    "optimizers-made-when-first-used": """
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizers = {}
for step in range(4):
    F.cross_entropy(net(torch.randn(8, 4)), torch.randint(0, 3, (8,))).backward()
    for p in net.parameters():
        if p not in optimizers:
            optimizers[p] = torch.optim.Adam([p], lr=0.01)
        optimizers[p].step()
    net.zero_grad()
""",
    "gan": NETWORKS + """
g, d = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
bce = F.binary_cross_entropy_with_logits
for step in range(6):
    D.zero_grad()
    bce(D(torch.randn(8, 4)), torch.ones(8, 1)).backward()
    fake = G(torch.randn(8, 4))
    bce(D(fake.detach()), torch.zeros(8, 1)).backward()
    d.step()
    G.zero_grad()
    bce(D(fake), torch.ones(8, 1)).backward()
    g.step()
""",
    "wgan": NETWORKS + """
g, d = torch.optim.RMSprop(G.parameters(), lr=1e-3), torch.optim.RMSprop(D.parameters(), lr=1e-3)
for step in range(4):
    for _ in range(3):
        d.zero_grad()
        (D(G(torch.randn(8, 4)).detach()).mean() - D(torch.randn(8, 4)).mean()).backward()
        d.step()
        for p in D.parameters():
            p.data.clamp_(-0.1, 0.1)
    g.zero_grad()
    (-D(G(torch.randn(8, 4))).mean()).backward()
    g.step()
""",
    "soft-actor-critic": """
actor, q = nn.Linear(4, 2), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
target = copy.deepcopy(q)
log_alpha = torch.zeros(1, requires_grad=True)
of_actor, of_q = torch.optim.Adam(actor.parameters()), torch.optim.Adam(q.parameters())
of_alpha = torch.optim.Adam([log_alpha])
for step in range(5):
    s, after, reward = torch.randn(16, 4), torch.randn(16, 4), torch.randn(16, 1)
    with torch.no_grad():
        law = Normal(actor(after), 0.3)
        a = law.sample()
        bonus = log_alpha.exp() * law.log_prob(a).sum(-1, keepdim=True)
        goal = reward + 0.9 * (target(torch.cat([after, a], -1)) - bonus)
    q_loss = F.mse_loss(q(torch.cat([s, torch.randn(16, 2)], -1)), goal)
    of_q.zero_grad()
    q_loss.backward()
    of_q.step()
    law = Normal(actor(s), 0.3)
    a = law.rsample()
    log_prob = law.log_prob(a).sum(-1, keepdim=True)
    actor_loss = (log_alpha.exp().detach() * log_prob - q(torch.cat([s, a], -1))).mean()
    of_actor.zero_grad()
    actor_loss.backward()
    of_actor.step()
    alpha_loss = -(log_alpha * (log_prob + 2).detach()).mean()
    of_alpha.zero_grad()
    alpha_loss.backward()
    of_alpha.step()
    with torch.no_grad():
        for t, p in zip(target.parameters(), q.parameters()):
            t.mul_(0.99).add_(0.01 * p)
""",
    "truncated-recurrence": """
rnn, head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)
optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()])
state = None
for step in range(5):
    out, state = rnn(torch.randn(2, 5, 4), state)
    state = tuple(t.detach() for t in state)
    loss = F.cross_entropy(head(out).transpose(1, 2), torch.randint(0, 3, (2, 5)))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(rnn.parameters(), 1.0)
    optimizer.step()
""",
    "ppo": """
pi, v = nn.Linear(4, 3), nn.Linear(4, 1)
optimizer = torch.optim.Adam([*pi.parameters(), *v.parameters()])
for round in range(2):
    s = torch.randn(32, 4)
    with torch.no_grad():
        law = Categorical(logits=pi(s))
        a = law.sample()
        old, advantage = law.log_prob(a), torch.randn(32)
    for epoch in range(2):
        for rows in torch.randperm(32).split(16):
            law = Categorical(logits=pi(s[rows]))
            ratio = (law.log_prob(a[rows]) - old[rows]).exp()
            gain = torch.min(ratio * advantage[rows], ratio.clamp(0.8, 1.2) * advantage[rows])
            value = F.mse_loss(v(s[rows]).squeeze(-1), advantage[rows])
            loss = value - gain.mean() - 0.01 * law.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(pi.parameters(), 0.5)
            optimizer.step()
""",
    "scaler-that-skips": """
net = nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
for step in range(6):
    with torch.autocast("cpu", torch.float16):
        logits = net(torch.randn(8, 4))
    loss = F.cross_entropy(logits.float(), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
""",
    "gradient-surgery": """
net = nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(5):
    out = net(torch.randn(8, 4))
    parts = []
    for loss in (out.square().mean(), (out - 1).square().mean()):
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        parts.append([p.grad.clone() for p in net.parameters()])
    for p, *gradients in zip(net.parameters(), *parts):
        p.grad = sum(gradients)
    optimizer.step()
""",
    "evaluation-and-checkpoints": """
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(net.parameters())
for step in range(6):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    with torch.no_grad():
        accuracy = (net(x).argmax(-1) == y).float().mean().item()
    best = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
    net.load_state_dict(best[0])
    optimizer.load_state_dict(best[1])
""",
}  # fmt: skip


@pytest.mark.parametrize("mode", ["auto", "light", "trace"])
@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS)
def test_a_right_loop_is_left_in_peace(tmp_path, source, mode):
    nothing(tmp_path, source, mode=mode)
