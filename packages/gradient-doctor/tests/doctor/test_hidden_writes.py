"""Class 13 without torch's error: values changed through `.data` between forward and backward."""

import pytest
import torch
from torch import nn

from doctor.snippets import nothing, only
from gradient_doctor import Severity

SETUP = """
body, deep, head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
target = copy.deepcopy(head).requires_grad_(False)
everything = [*body.parameters(), *deep.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(everything, lr=0.1)
keep = (torch.rand(8, 8) > 0.5).float()
deep.weight.data *= keep
for step in range(4):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
{lines}
"""
FORWARD = ("f = torch.tanh(deep(torch.tanh(body(x))))", "loss = F.cross_entropy(head(f), y)")
END = ("optimizer.zero_grad()", "loss.backward()", "optimizer.step()")


def script(*lines):
    return SETUP.format(lines="\n".join(f"    {line}" for line in lines))


WEIGHTS = {
    "clamp": "head.weight.data.clamp_(-0.1, 0.1)  # FAULT",
    "decay": "head.weight.data.mul_(0.9)  # FAULT",
    "minus": "head.weight.data -= 0.01  # FAULT",
    "view": "head.weight.data[0].zero_()  # FAULT",
    "item": "head.weight.data[0] = 1.0  # FAULT",
    "out": "torch.mul(head.weight, 0.9, out=head.weight.data)  # FAULT",
    "copy": "for p, q in [(head.weight, target.weight)]: p.data.copy_(2 * q)  # FAULT",
}


@pytest.mark.parametrize("line", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_changed_behind_torchs_back(tmp_path, line):
    line = line.replace("(head.weight, 0.9", "(head.weight.detach(), 0.9")
    finding = only(tmp_path, script(*FORWARD, line, *END), 13)
    assert finding.severity is Severity.WARNING
    assert finding.parameters == ("head.weight",)
    assert "head.weight" in finding.what


def test_data_that_is_replaced(tmp_path):
    # a product keeps the parameter itself, so it sees what is put in its place
    lines = ("s = head.bias * torch.tanh(deep(body(x)))[:, :3]", "loss = s.square().mean()")
    fault = "head.bias.data = torch.ones(3)  # FAULT"
    rest = "loss = loss + F.cross_entropy(head(deep(body(x))), y)"
    finding = only(tmp_path, script(*lines, rest, fault, *END), 13)
    assert finding.parameters == ("head.bias",)


def test_many_weights_by_one_line(tmp_path):
    fault = "for p in everything: p.data.mul_(0.99)  # FAULT"
    finding = only(tmp_path, script(*FORWARD, fault, *END), 13)
    # the first layer's weight and the biases are not part of any derivative
    assert finding.parameters == ("deep.weight", "head.weight")
    assert finding.what.startswith("deep.weight, head.weight are changed by `mul_`")


def test_an_activation_changed_behind_torchs_back(tmp_path):
    lines = (FORWARD[0], "f.data.mul_(2.0)  # FAULT", FORWARD[1])
    finding = only(tmp_path, script(*lines, *END), 13)
    assert "A value is changed by `mul_`" in finding.what
    assert "TanhBackward0" in finding.why


CLEAN = {
    "wgan": (*FORWARD, *END, "for p in everything: p.data.clamp_(-0.1, 0.1)"),
    "before-the-forward": ("for p in everything: p.data.mul_(0.99)", *FORWARD, *END),
    "masked-again": (
        *FORWARD, "deep.weight.data.mul_(keep)", *END, "deep.weight.data.mul_(keep)"
    ),
    "first-layer": (*FORWARD, "body.weight.data.mul_(0.99)", *END),
    "target": (
        "with torch.no_grad(): t = target(torch.tanh(deep(torch.tanh(body(x)))))",
        FORWARD[0],
        "loss = (head(f) - t).square().mean()",
        "for t, p in zip(target.parameters(), head.parameters()):",
        "    t.data.mul_(0.9).add_(0.1 * p.data)",
        *END,
    ),
    "between-backward-and-step": (*FORWARD, *END[:2], "head.weight.data.mul_(0.99)", END[2]),
    "of-a-copy": (*FORWARD, "w = head.weight.data.clone().mul_(0.5)", *END),
    "gradients": (*FORWARD, *END[:2], "for p in everything: p.grad.data.mul_(0.5)", END[2]),
    "forward-again": (*FORWARD, "head.weight.data.mul_(0.9)", *FORWARD, *END),
    "not-kept": (
        FORWARD[0], "f2 = f + 1.0", "f2.data.mul_(2.0)", "loss = F.cross_entropy(head(f2), y)",
        *END,
    ),
}  # fmt: skip


@pytest.mark.parametrize("lines", CLEAN.values(), ids=CLEAN)
def test_changes_that_do_no_harm(tmp_path, lines):
    nothing(tmp_path, script(*lines))


def test_checkpoints_are_not_run_again_by_looking(tmp_path):
    lines = (
        "f = checkpoint(lambda v: torch.tanh(deep(torch.tanh(body(v)))), x, use_reentrant=False)",
        FORWARD[1],
        "head.weight.data.mul_(0.9)  # FAULT",
        *END,
    )
    assert only(tmp_path, script(*lines), 13).parameters == ("head.weight",)


def test_the_gradient_is_really_wrong():
    """The rule's premise: torch says nothing, and the gradient is another one."""

    def gradient(change):
        torch.manual_seed(0)
        body, head = nn.Linear(3, 4), nn.Linear(4, 1)
        loss = head(torch.tanh(body(torch.ones(2, 3)))).square().mean()
        if change:
            head.weight.data.mul_(3.0)
        loss.backward()
        return body.weight.grad

    assert not torch.allclose(gradient(False), gradient(True))
