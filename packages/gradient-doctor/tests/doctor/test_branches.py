"""Class 31: stages of a learning rate that are never reached."""

import pytest

from doctor.snippets import nothing, only

STAGES = """
net = nn.Linear(4, 3)
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
def adjust(epoch, epochs=4):
    lr = 0.1
{stages}
    for group in sgd.param_groups:
        group["lr"] = lr
for epoch in range(4):
    adjust(epoch)
    loss = F.cross_entropy(net(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
    sgd.zero_grad()
    loss.backward()
    sgd.step()
"""


def stages(*lines):
    return STAGES.format(stages="\n".join(f"    {line}" for line in lines))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("epoch >= 1", "epoch >= 3"),
        ("epoch < 3", "epoch <= 1"),
        ("1 < epoch", "epoch > 1"),
        ("epoch > 0.5 * epochs", "epoch > epochs * 0.75"),
    ],
)
def test_a_condition_that_includes_a_later_one(tmp_path, first, second):
    lines = (f"if {first}: lr = 0.05", f"elif {second}: lr = 0.01  # FAULT")
    only(tmp_path, stages(*lines), 31)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("epoch >= 3", "epoch >= 1"),
        ("epoch < 1", "epoch < 3"),
        ("epoch > 1", "epoch >= 1"),
        ("epoch > 1 and epochs > 8", "epoch > 2"),
        ("epoch > 1", "epochs > 2"),
        ("epoch > 1", "epoch < 1"),
    ],
)
def test_stages_that_are_reached(tmp_path, first, second):
    nothing(tmp_path, stages(f"if {first}: lr = 0.05", f"elif {second}: lr = 0.01"))


def test_stages_that_follow_each_other(tmp_path):
    nothing(tmp_path, stages("if epoch > 1: lr *= 0.5", "if epoch > 2: lr *= 0.5"))


RETURNED = """
net = nn.Linear(4, 3)
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
def rate(epoch):
    if epoch > {first}:
        return 0.05
    elif epoch > {second}:  # FAULT
        return 0.01
    return 0.1
for epoch in range(4):
    lr = rate(epoch)
    for group in sgd.param_groups:
        group["lr"] = lr
    loss = F.cross_entropy(net(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
    sgd.zero_grad()
    loss.backward()
    sgd.step()
"""


def test_a_rate_that_a_function_returns(tmp_path):
    only(tmp_path, RETURNED.format(first=1, second=2), 31)
    nothing(tmp_path, RETURNED.format(first=2, second=1))


@pytest.mark.parametrize("chosen", ["0.1 if epoch < 2 else 0.05", "(lambda: 0.1)()"])
def test_a_rate_that_an_expression_chooses(tmp_path, chosen):
    nothing(tmp_path, stages(f"lr = {chosen}", "if epoch > 3: lr = 0.01"))
