"""Class 21: what should follow other weights, and whose update nobody calls."""

import pytest

from doctor.look import look

PAIR = """\
import copy

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.slow = copy.deepcopy(self.online).requires_grad_(False)

    @torch.no_grad()
    def follow_target(self):  # HERE
        for p, q in zip(self.online.parameters(), self.slow.parameters()):
            q.lerp_(p, 0.05)

    def forward(self, x):
        with torch.no_grad():
            goal = self.slow(x + 0.1)
        return (self.online(x) - goal - 1).square().mean()

pair = Pair()
optimizer = torch.optim.Adam(pair.online.parameters(), 0.01)
for step in range(10):
    loss = pair(torch.randn(8, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {then}
"""


def test_a_target_that_nobody_moves(tmp_path):
    assert "never called" in look(tmp_path, PAIR.format(then="pass")).one(21).what


@pytest.mark.parametrize(
    "then",
    [
        "pair.follow_target()",
        "getattr(pair, 'follow_target')()",
        "if step == 9: pair.slow.load_state_dict(pair.online.state_dict())",
        "if step % 500 == 499: pair.slow.load_state_dict(pair.online.state_dict())",
        "if step > 500: pair.follow_target()",  # a short run
    ],
)
def test_a_target_that_somebody_moves_or_means_to(tmp_path, then):
    look(tmp_path, PAIR.format(then=then)).clean()


def test_a_reference_stands_still_on_purpose(tmp_path):
    body = PAIR.format(then="pass").replace("q.lerp_(p, 0.05)", "print((p - q).norm())")
    look(tmp_path, body).clean()


KEPT = """\
class Shadow:
    def __init__(self, model):
        self.model = model
        self.average = {{n: p.detach().clone() for n, p in model.named_parameters()}}

    def absorb(self):  # HERE
        for name, p in self.model.named_parameters():
            self.average[name] = 0.9 * self.average[name] + 0.1 * p.detach()

    def apply_ema(self):
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(self.average[name])

model = nn.Linear(4, 2)
shadow = Shadow(model)
optimizer = torch.optim.Adam(model.parameters())
for step in range(10):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {then}
shadow.apply_ema()
"""


def test_an_average_that_nobody_updates(tmp_path):
    body = KEPT.replace("class Shadow", "class EMAShadow").replace("= Shadow", "= EMAShadow")
    look(tmp_path, body.format(then="pass")).one(21)
    (tmp_path / "right").mkdir()  # sources are read once
    look(tmp_path / "right", body.format(then="shadow.absorb()")).clean()


PARTS = """\
import copy

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.slow_body = copy.deepcopy(self.body).requires_grad_(False)
        self.slow_head = copy.deepcopy(self.head).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            goal = self.slow_head(self.slow_body(x).tanh())
        return (self.head(self.body(x).tanh()) - goal - 1).square().mean()

net = Net()
optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], 0.01)
pairs = [(net.body, net.slow_body), (net.head, net.slow_head)]
for step in range(10):
    loss = net(torch.randn(8, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for fast, slow in pairs{which}:
        for p, q in zip(fast.parameters(), slow.parameters()):
            q.data = 0.9 * q.data + 0.1 * p.data  # HERE
"""


def test_one_copy_follows_and_the_other_does_not(tmp_path):
    assert "do not follow" in look(tmp_path, PARTS.format(which="[:1]")).one(21).what
    look(tmp_path, PARTS.format(which="")).clean()
    look(tmp_path, PARTS.format(which="[:0]")).clean()  # all of it is a reference
