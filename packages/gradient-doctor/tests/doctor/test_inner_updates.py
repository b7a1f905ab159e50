"""Meta-learning: inner steps whose gradients have no graph."""

import pytest

from doctor.snippets import nothing, only

META = """
{comment}
from torch.func import functional_call
model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
meta = torch.optim.Adam(model.parameters())

def adapt(x, y):
    fast = dict(model.named_parameters())
    for _ in range(2):
        loss = F.mse_loss(functional_call(model, fast, x), y)
        grads = torch.autograd.grad(loss, tuple(fast.values()){graph})  # FAULT
        fast = {{name: w - 0.1 * g for (name, w), g in zip(fast.items(), grads)}}
    return fast

for step in range(4):
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    fast = adapt(x[:4], y[:4])
    outer = F.mse_loss(functional_call(model, fast, x[4:]), y[4:])
    meta.zero_grad()
    outer.backward()
    meta.step()
"""


def test_an_inner_gradient_without_a_graph(tmp_path):
    finding = only(tmp_path, META.format(comment="", graph=""), 3)
    assert len(finding.parameters) == 4
    assert "create_graph=True" in finding.fix


@pytest.mark.parametrize(
    ("comment", "graph"),
    [
        ("", ", create_graph=True"),
        ("", ", create_graph=False"),
        ("# first-order MAML", ""),
    ],
)
def test_what_the_program_chooses(comment, graph, tmp_path):
    nothing(tmp_path, META.format(comment=comment, graph=graph))


CLEAN = """
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    x, y = torch.randn(8, 4, requires_grad=True), torch.randint(0, 3, (8,))
{body}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
BODIES = {
    "the worst weights": [
        "named = dict(model.named_parameters())",
        "gs = torch.autograd.grad(F.cross_entropy(model(x), y), tuple(named.values()))",
        "named = {k: p + 0.1 * g for (k, p), g in zip(named.items(), gs)}",
        "loss = F.cross_entropy(torch.func.functional_call(model, named, x), y)",
    ],
    "an attack": [
        "g, = torch.autograd.grad(F.cross_entropy(model(x), y), x)",
        "loss = F.cross_entropy(model(x + 0.1 * g.sign()), y)",
    ],
    "a latent code": [
        "z = torch.tanh(model[0](x))",
        "g, = torch.autograd.grad(F.cross_entropy(model[2](z), y), z, retain_graph=True)",
        "loss = F.cross_entropy(model[2](z - 0.1 * g), y)",
    ],
}


@pytest.mark.parametrize("name", BODIES)
def test_a_step_of_something_else(name, tmp_path):
    nothing(tmp_path, CLEAN.format(body="\n".join(f"    {line}" for line in BODIES[name])))
