"""Class 20, up to rounding: losses that are constants by their formula."""

import pytest

from doctor.look import look, names

LOOP = """\
body, head, norm = nn.Linear(4, 6), nn.Linear(6, 1), nn.LayerNorm(6)
last = nn.BatchNorm1d(1)
optimizer = torch.optim.Adam([p for m in (body, head, norm, last) for p in m.parameters()], lr=1e-2)
for step in range(5):
    x, weight = torch.randn(8, 4), torch.randn(8)
    h = body(x)
    # all parameters have a use
    rest = norm(h.detach()).square().mean() + last(head(h.detach())).square().mean()
{loss}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CONSTANT = {
    "probabilities": (
        "chosen = F.one_hot(torch.randint(0, 6, (8,)), 6)",
        "miss = chosen - h.softmax(-1)  # HERE",
        "loss = rest + (miss * weight[:, None]).sum(-1).mean()",
    ),
    "normalised": ("loss = rest + F.layer_norm(h, (6,)).mean()  # HERE",),
    "centred": ("c = h - h.mean(0)  # HERE", "loss = rest + c.sum()"),
    "divergence-from-itself": (
        "d = h.log_softmax(-1)[:, 0]",
        "d = d - d.detach()",
        "loss = rest + (d.exp() - 1 - d).mean()  # HERE",
    ),
}


def loop(tmp_path, lines):
    return look(tmp_path, LOOP.format(loss="\n".join("    " + line for line in lines)))


@pytest.mark.parametrize("lines", CONSTANT.values(), ids=CONSTANT)
def test_only_rounding_is_left(tmp_path, lines):
    finding = loop(tmp_path, lines).one(20)
    assert names(finding) == {"weight", "bias"}
    assert "rounding is left" in finding.why


LEARNS = {
    "one-probability": ("loss = rest + (h.softmax(-1)[:, 0] * weight).mean()",),
    "normalised-and-weighed": ("loss = rest + head(F.layer_norm(h, (6,))).mean()",),
    "beside-another-loss": ("loss = rest + h.softmax(-1).sum(-1).mean() + h.square().mean()",),
    "in-a-backward-of-its-own": (
        "d = h.log_softmax(-1)[:, 0]",
        "(d - d.detach()).exp().sub(d - d.detach()).mean().backward(retain_graph=True)",
        "loss = rest + (d * weight).mean()",
    ),
    "sure": ("loss = rest + F.cross_entropy(h * 100, h.argmax(-1))",),
    "same-values": (
        "a = (h @ h.T).softmax(-1)",
        "loss = rest + (a @ torch.ones(8, 1)).square().mean() + h.square().mean()",
    ),
}


@pytest.mark.parametrize("lines", LEARNS.values(), ids=LEARNS)
def test_a_gradient_that_is_more_than_rounding(tmp_path, lines):
    loop(tmp_path, lines).clean()


ATTENTION = """\
query, key, out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
parts = (query, key, out)
optimizer = torch.optim.Adam([p for m in parts for p in m.parameters()], lr=1e-2)
for step in range(5):
    x, first = torch.randn(8, 5, 4), torch.ones(8, 5, 4)
    a = (query(x) @ key(x).mT).softmax(-1)
    loss = (out(a @ first) - x.mean(-1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_attention_to_values_that_are_all_the_same_is_left_in_peace(tmp_path):
    look(tmp_path, ATTENTION).clean()


PENALTY = """\
body, head = nn.Linear(4, 8), nn.Linear(8, 3)
optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])
for step in range(4):
    z = body(torch.randn(6, 4)).tanh()
    label = torch.arange(6) % 3
    p = head(z).softmax(-1)
    {chosen}
    [slope] = torch.autograd.grad(chosen, [z], create_graph=True)
    loss = F.nll_loss((p + 1e-6).log(), label) + slope.square().sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_penalty_on_the_slope_of_a_constant(tmp_path):
    found = look(tmp_path, PENALTY.format(chosen="chosen = p[:, label].sum()  # HERE"))
    assert "what autograd.grad returns" in found.one(20).why
    look(tmp_path, PENALTY.format(chosen="chosen = p[torch.arange(6), label].sum()")).clean()
