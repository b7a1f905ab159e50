"""Class 23: a term that reaches only parameters whose gradients nobody uses."""

import pytest

from doctor.snippets import nothing, only

GAN = """
maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
one, two = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
for step in range(5):
    x, real = torch.randn(8, 4), torch.randn(8, 4)
    made = maker(x)
{body}
    one.zero_grad()
    loss.backward()
    one.step()
    loss = F.softplus(judge(made.detach())).mean() + F.softplus(-judge(real)).mean()
    two.zero_grad()
    loss.backward()
    two.step()
"""


def gan(*body: str) -> str:
    return GAN.format(body="\n".join(f"    {line}" for line in body))


FAULTS = {
    "real": [
        "score = judge(real)  # FAULT",
        "loss = F.softplus(-score).mean() + F.l1_loss(made, real)",
    ],
    "passed-on": [
        "def adversarial(frame):",
        "    return F.softplus(-judge(frame)).mean()",
        "loss = F.l1_loss(made, real) + 0.1 * adversarial(real)  # FAULT",
    ],
    "detached": [
        "score = judge(made.detach())  # FAULT",
        "loss = F.softplus(-score).mean() + F.l1_loss(made, real)",
    ],
    "detached beside another score": [
        "again = maker(x + 1).data  # FAULT",
        "loss = F.l1_loss(made, real) - judge(made).mean() - 0.1 * judge(again).tanh().mean()",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_generator_is_scored_on_the_real_sample(name, tmp_path):
    cut = name.startswith("detached")
    finding = only(tmp_path, gan(*FAULTS[name]), 3 if cut else 23)
    assert any(p.startswith("maker" if cut else "judge") for p in finding.parameters)


CLEAN = {
    "made": ["loss = F.softplus(-judge(made)).mean() + F.l1_loss(made, real)"],
    "whole-distance": ["loss = judge(real).mean() - judge(made).mean() + F.l1_loss(made, real)"],
    "features": ["loss = F.mse_loss(judge(made), judge(real)) + F.l1_loss(made, real)"],
}


@pytest.mark.parametrize("name", CLEAN)
def test_what_the_generator_learns_from(name, tmp_path):
    nothing(tmp_path, gan(*CLEAN[name]))


def test_parts_that_take_turns(tmp_path):
    source = """
a, b = nn.Linear(4, 4), nn.Linear(4, 4)
optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (a, b)]
for step in range(8):
    x = torch.randn(8, 4)
    for optimizer in optimizers:
        optimizer.zero_grad()
    (F.mse_loss(a(x), x) + F.mse_loss(b(x), -x)).backward()
    optimizers[step % 2].step()
"""
    nothing(tmp_path, source)
