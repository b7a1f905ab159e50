"""Class 28: gradients that nothing clears between two steps of their optimizer."""

import pytest

from doctor.snippets import look, nothing, only, serious

LOOP = """
net, other = nn.Linear(4, 3), nn.Linear(3, 1)
sgd = torch.optim.SGD(net.parameters(), lr=0.01)
second = torch.optim.Adam(other.parameters())
for step in range(5):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
{body}
"""


def loop(body):
    return LOOP.format(body="\n".join(f"    {line}" for line in body.strip().splitlines()))


FAULTS = {
    "never": """
loss = F.cross_entropy(net(x), y)
loss.backward()  # FAULT
sgd.step()
""",
    "clipped": """
loss = F.cross_entropy(net(x), y)
loss.backward()  # FAULT
nn.utils.clip_grad_norm_(net.parameters(), 1.0)
sgd.step()
""",
    "the-other-one-is-cleared": """
second.zero_grad()
F.cross_entropy(net(x), y).backward()  # FAULT
sgd.step()
other(net(x).detach()).square().mean().backward()
second.step()
""",
    "micro-batches": """
for part in x.chunk(2):
    net(part).square().mean().backward()  # FAULT
sgd.step()
""",
    "the-second-loss": """
sgd.zero_grad()
net(x).square().mean().backward()
sgd.step()
F.cross_entropy(net(x), y).backward()  # FAULT
sgd.step()
""",
    "one-of-two-branches": """
if step < 9:
    net(x).square().mean().backward()  # FAULT
    sgd.step()
else:
    sgd.zero_grad()
    net(x).square().mean().backward()
    sgd.step()
""",
}
CLEAN = {
    "after": """
F.cross_entropy(net(x), y).backward()
sgd.step()
sgd.zero_grad()
""",
    "accumulation": """
F.cross_entropy(net(x), y).backward()
if step % 2:
    sgd.step()
    sgd.zero_grad()
""",
    "by-hand": """
F.cross_entropy(net(x), y).backward()
sgd.step()
for p in net.parameters():
    p.grad = None
""",
    "zeroed-by-hand": """
F.cross_entropy(net(x), y).backward()
sgd.step()
for p in net.parameters():
    p.grad.zero_()
""",
    "what-the-other-loss-leaves": """
sgd.zero_grad()
net(x).square().mean().backward()
sgd.step()
second.zero_grad()
other(net(x)).square().mean().backward()
second.step()
""",
    "module": """
net.zero_grad()
F.cross_entropy(net(x), y).backward()
sgd.step()
""",
}


@pytest.mark.parametrize("body", FAULTS.values(), ids=FAULTS)
def test_used_again(tmp_path, body):
    finding = only(tmp_path, loop(body), 28)
    assert finding.parameters == ("net.weight", "net.bias")
    assert "sgd.zero_grad()" in finding.fix


RARELY = """
net = nn.Linear(4, 3)
sgd = torch.optim.SGD(net.parameters(), lr=0.01)
for epoch in range(3):
    {before}
    for step in range(5):
        x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
        F.cross_entropy(net(x), y).backward()
        sgd.step()
    {after}
"""


@pytest.mark.parametrize("call", ["sgd.zero_grad()", "net.zero_grad(set_to_none=True)"])
def test_cleared_once_an_epoch_that_line_is_named(tmp_path, call):
    finding = only(tmp_path, RARELY.format(before=f"{call}  # FAULT", after=""), 28)
    assert "too rarely" in finding.fix


def test_cleared_at_the_end_of_an_epoch(tmp_path):
    only(tmp_path, RARELY.format(before="", after="sgd.zero_grad()  # FAULT"), 28)


@pytest.mark.parametrize("body", CLEAN.values(), ids=CLEAN)
def test_cleared(tmp_path, body):
    source = loop(body)
    if "second" not in body:
        source = source.replace("second = torch.optim.Adam(other.parameters())\n", "")
    nothing(tmp_path, source)


CLOSURE = """
net = nn.Linear(4, 3)
optimizer = torch.optim.{kind}(net.parameters(), lr=0.01)
x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
def closure():
{clear}
    loss = F.cross_entropy(net(x), y)
    loss.backward()  # FAULT
    return loss
for step in range(5):
    optimizer.step(closure)
"""


@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_a_closure_that_clears_nothing(kind, tmp_path):
    only(tmp_path, CLOSURE.format(kind=kind, clear="    pass"), 28)


def test_a_closure_of_lbfgs_that_clears_nothing(tmp_path):
    examination, lines = look(tmp_path, CLOSURE.format(kind="LBFGS", clear="    pass"))
    assert 28 in [f.number for f in serious(examination) if f.site.line in lines]


@pytest.mark.parametrize("kind", ["Adam", "SGD", "LBFGS"])
def test_a_closure_that_clears_its_gradients(kind, tmp_path):
    nothing(tmp_path, CLOSURE.format(kind=kind, clear="    optimizer.zero_grad()"))
