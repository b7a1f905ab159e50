"""Class 26: train() and eval() modes."""

import pytest

from doctor.look import look, names
from doctor.snippets import nothing, only

LOOP = """\
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), {part}, nn.ReLU())
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.body(x)).squeeze(-1)

@torch.no_grad()
def {evaluate}(model, x):
{before}
    value = model(x).mean().item()
{after}
    return value

model = Model()
{start}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    x = torch.randn(6, 4)
    loss = (model(x) - x.sum(-1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {evaluate}(model, x)
"""
EVAL, TRAIN, NOTHING = "    model.eval()", "    model.train()", "    pass"


def loop(
    tmp_path, before=EVAL, after=TRAIN, part="nn.Dropout(0.2)", start="model.train()", **options
):
    rest = {"evaluate": options.pop("evaluate", "check"), "steps": options.pop("steps", 4)}
    body = LOOP.format(before=before, after=after, part=part, start=start, **rest)
    return look(tmp_path, body, **options)


def test_a_loop_that_switches_back_is_clean(tmp_path):
    loop(tmp_path).clean()
    loop(tmp_path, part="nn.BatchNorm1d(8)").clean()
    loop(tmp_path, before="    model.train(False)", after="    model.train(True)").clean()


def test_a_loop_that_stays_in_eval(tmp_path):
    for part in ("nn.Dropout(0.2)", "nn.BatchNorm1d(8)"):
        finding = loop(tmp_path, before=EVAL + "  # HERE", after=NOTHING, part=part).one(26)
        assert "middle of training" in finding.what
        assert names(finding) >= {"body.0.weight", "last.bias"}
    # also if it happens after the steps that are traced
    late = "    model.train(step < 4)  # HERE"
    for steps in (8, 60):
        finding = loop(tmp_path, before=NOTHING, after=late, steps=steps).one(26)
        assert "middle of training" in finding.what


def test_a_model_without_such_parts_is_a_note(tmp_path):
    found = loop(tmp_path, after=NOTHING, part="nn.Identity()")
    found.clean()
    assert [f.severity for f in found.of(26)] == [1]
    told = loop(tmp_path, after=NOTHING, part="nn.Identity()", contract={"phase": "train"})
    assert told.of(26)[0].severity == 2


def test_trained_in_eval_from_the_start(tmp_path):
    finding = loop(tmp_path, NOTHING, NOTHING, start="model.eval()  # HERE").one(26)
    assert "middle" not in finding.what


def test_parts_frozen_on_purpose(tmp_path):
    loop(tmp_path, NOTHING, NOTHING, "nn.BatchNorm1d(8)", "model.body[1].eval()").clean()


def test_only_the_inside_is_in_eval(tmp_path):
    """A part that was switched, or loaded, in eval() and then wrapped; its wrapper says train."""
    finding = loop(tmp_path, NOTHING, NOTHING, start="model.body.eval()  # HERE").one(26)
    assert "dropout" in finding.what
    loop(tmp_path, NOTHING, NOTHING, "nn.Dropout(0.0)", "model.body.eval()").clean()


def test_evaluated_in_train_mode(tmp_path):
    finding = loop(tmp_path, NOTHING, NOTHING, evaluate="evaluate").one(26)
    assert "evaluate()" in finding.what
    loop(tmp_path, NOTHING, NOTHING, evaluate="rollout").clean()
    loop(tmp_path, NOTHING, NOTHING, "nn.Identity()", evaluate="evaluate").clean()


def test_the_contract_may_say_eval(tmp_path):
    found = loop(tmp_path, contract={"phase": "eval"})
    assert any(f.number == 26 and f.severity == 2 for f in found.findings)


FUNCTIONAL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
    def forward(self, x):
        h = F.relu(self.body(x))
        {line}
        return self.head(h)
model = Model()
optimizer = torch.optim.Adam(model.parameters())
for epoch in range(2):
    model.train()
    for step in range(4):
        loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(torch.randn(8, 4))
"""


def test_functional_dropout_does_not_know_the_mode(tmp_path):
    finding = only(tmp_path, FUNCTIONAL.format(line="h = F.dropout(h, 0.2)  # FAULT"), 26)
    assert "self.training" in finding.fix


@pytest.mark.parametrize(
    "line",
    [
        "h = F.dropout(h, 0.2) + F.dropout(h, 0.2, self.training)  # FAULT",
        "h = F.dropout(F.batch_norm(h, None, None, training=True), 0.2)  # FAULT",
        "h = F.scaled_dot_product_attention(h, h, h, dropout_p=0.2)  # FAULT",
    ],
)
def test_the_mode_that_another_call_is_told(tmp_path, line):
    only(tmp_path, FUNCTIONAL.format(line=line), 26)


def test_evaluation_of_a_part_that_does_not_drop(tmp_path):
    source = FUNCTIONAL.format(line="h = F.dropout(h, 0.2)")
    nothing(tmp_path, source.replace("        model(torch", "        model.body(torch"))


@pytest.mark.parametrize(
    "line",
    [
        "h = F.dropout(h, 0.2, training=self.training)",
        "h = F.dropout(h, 0.2, self.training)",
        "h = F.dropout(h, 0.2, training=True)",
        "h = F.dropout(h, 0.0)",
        "h = nn.Dropout(0.2).train(self.training)(h)",
        "h = F.dropout(h, 0.2) if self.training else h",
        "p = 0.2 if self.training else 0.0; h = F.dropout(h, p)",
    ],
)
def test_dropout_that_knows_it(tmp_path, line):
    nothing(tmp_path, FUNCTIONAL.format(line=line))


HELD_OUT = """
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
val_loader = [(torch.randn(8, 4), torch.randint(0, 3, (8,)))]
for epoch in range(3):
    for step in range(4):
        model.train()
        loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    {switch}
    with torch.no_grad():
        for x, y in {data}:
            right = (model(x).argmax(1) == y).sum()  # FAULT
"""


LIBRARYS = """
import sys
sys.path.append({folder!r})
from drops_by_its_own_mode import drop

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
    def forward(self, x):
        return drop(self, self.layer(x))

model = Model()
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    model.train()
    loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        model(torch.randn(8, 4))
"""


def test_a_librarys_dropout_below_a_users_line(tmp_path):
    """Graph libraries call their layers from code that they write themselves."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "drops_by_its_own_mode.py").write_text(
        "import torch.nn.functional as F\n"
        "def drop(module, x):\n    return F.dropout(x, p=0.5, training=module.training)\n"
    )
    nothing(tmp_path, LIBRARYS.format(folder=str(folder)))


def test_held_out_data_in_train_mode_between_two_looks(tmp_path):
    only(tmp_path, HELD_OUT.format(switch="", data="val_loader"), 26)


@pytest.mark.parametrize(("switch", "data"), [("model.eval()", "val_loader"), ("", "pairs")])
def test_held_out_data_in_eval_mode_and_other_data(tmp_path, switch, data):
    source = HELD_OUT.format(switch=switch, data=data).replace(
        "for epoch", "pairs = val_loader\nfor epoch"
    )
    nothing(tmp_path, source)


EVALUATED = """\
net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
optimizer = torch.optim.Adam(net.parameters())

def evaluate(x, y):
    net.{mode}()  # HERE
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean()

for _ in range(4):
    net.train()
    loss = F.cross_entropy(net(torch.randn(8, 4)), torch.randint(0, 2, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    evaluate(torch.randn(8, 4), torch.randint(0, 2, (8,)))
"""


def test_train_in_place_of_eval_is_the_line(tmp_path):
    look(tmp_path, EVALUATED.format(mode="train")).one(26)
    look(tmp_path, EVALUATED.format(mode="eval")).clean()
