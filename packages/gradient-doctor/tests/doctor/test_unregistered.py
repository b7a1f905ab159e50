"""Class 7: layers in a plain attribute; the line is the one that puts them there."""

import pytest

from doctor.look import look

SCRIPT = """\
class Bag:
    def __init__(self, layers):
        self.layers = layers

def make(count):
    return [nn.Linear(4, 4) for _ in range(count)]

class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.rest = {rest}  # HERE

    def forward(self, x):
        x = self.first(x)
        for layer in {each}:
            x = torch.tanh(layer(x))
        return x

model = Net(make(2))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(5):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
KEPT = {
    "list": ("list(layers)", "self.rest"),
    "tuple": ("tuple(layers)", "self.rest"),
    "dict": ("{str(k): l for k, l in enumerate(layers)}", "self.rest.values()"),
    "object": ("Bag(layers)", "self.rest.layers"),
    "list of lists": ("[[layer] for layer in layers]", "sum(self.rest, [])"),
    "closures": (
        "[lambda x, l=l: l(x) for l in ()] + [(lambda l: lambda x: l(x))(l) for l in layers]",
        "self.rest",
    ),
}


@pytest.mark.parametrize(("rest", "each"), KEPT.values(), ids=KEPT)
def test_the_line_that_keeps_them(tmp_path, rest, each):
    finding = look(tmp_path, SCRIPT.format(rest=rest, each=each)).one(7)
    assert "4 parameters" in finding.what


def test_a_module_list(tmp_path):
    look(tmp_path, SCRIPT.format(rest="nn.ModuleList(layers)", each="self.rest")).clean()


PLAIN = """\
def weight(rows, columns):
    return (torch.randn(rows, columns) * 0.3).requires_grad_()

w, r, o = weight(5, 8), weight(8, 8), weight(8, 2)
x = {x}
y = torch.randint(0, 2, (16,))
optimizer = torch.optim.Adam([{held}], 0.01)  # HERE
for _ in range(8):
    state = torch.zeros(16, 8)
    for t in range(3):
        state = torch.tanh(x @ w + state @ r)
    loss = F.cross_entropy(state @ o, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_plain_tensor_that_the_optimizer_does_not_hold(tmp_path):
    look(tmp_path, PLAIN.format(x="torch.randn(16, 5)", held="w, o")).one(7)


def test_data_that_needs_gradient_for_no_reason(tmp_path):
    for x in ("torch.randn(16, 5)", "torch.randn(16, 5, requires_grad=True)"):
        look(tmp_path, PLAIN.format(x=x, held="w, r, o")).clean()
