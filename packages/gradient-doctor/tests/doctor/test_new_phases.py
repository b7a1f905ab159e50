"""A fault of a second part of training is said as it would have been in the first."""

import pytest

from doctor.look import look

# a low-rank pair around what was trained first; `{first}` starts the matrix that should be random
LOW_RANK = """\
class Low(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter({first})  # HERE
        self.up = nn.Parameter(torch.zeros(2, 5))

    def forward(self, x):
        return self.base(x) + x @ self.down @ self.up

def train(model, steps):
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(wanted, 0.01)
    for _ in range(steps):
        x = torch.randn(8, 5)
        loss = model(x).sin().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
train(model, 12)
model[0] = Low(model[0])
train(model, 12)
"""


def test_zeros_of_layers_that_come_later(tmp_path):
    seen = look(tmp_path, LOW_RANK.format(first="torch.zeros(5, 2)"))
    finding = seen.one(20)
    assert "Both factors" in finding.what


def test_a_second_phase_that_begins_right(tmp_path):
    look(tmp_path, LOW_RANK.format(first="torch.randn(5, 2)")).clean()


# the same optimizer, and a second loop (or the same helper, called from another line)
SECOND = """\
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.05)
x, y = torch.randn(16, 4), torch.randn(16)

def first():
    return (model(x).squeeze(1) - y).square().mean()

def second():
    return (model(x){squeeze} - y).square().mean()  # HERE

{loops}
"""
LOOPS = {
    "two loops": """\
for _ in range(7):
    optimizer.zero_grad()
    first().backward()
    optimizer.step()
for _ in range(7):
    optimizer.zero_grad()
    second().backward()
    optimizer.step()
""",
    "one helper": """\
def run(loss):
    for _ in range(7):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

run(first)
run(second)
""",
}


@pytest.mark.parametrize("loops", LOOPS.values(), ids=LOOPS)
def test_a_way_to_backward_that_none_has_taken_before(tmp_path, loops):
    look(tmp_path, SECOND.format(squeeze="", loops=loops)).one(18)
    look(tmp_path, SECOND.format(squeeze=".squeeze(1)", loops=loops)).clean()


COPIED = """\
def fit(net, optimizer, goal):
    for _ in range(8):
        x = torch.randn(16, 3)
        optimizer.zero_grad()
        (net(x) - goal(x)).square().mean().backward()
        optimizer.step()

def make():
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

speed = make()
optimizer = torch.optim.Adam(speed.parameters())
fit(speed, optimizer, lambda x: x.sum(1, keepdim=True))
noise = make()
optimizer = torch.optim.Adam({net}.parameters())  # HERE
fit(noise, optimizer, lambda x: x.prod(1, keepdim=True))
"""


def test_a_second_optimizer_of_the_first_network(tmp_path):
    look(tmp_path, COPIED.format(net="speed")).one(8)
    look(tmp_path, COPIED.format(net="noise")).clean()
