"""Classes 12, 13 and 14: each rule with its fault and with the code that only looks like it."""

import pytest
import torch
from torch import nn

from doctor.snippets import look, nothing, only
from gradient_doctor import Doctor, Severity

SETUP = """
body, deep, head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
first = torch.optim.SGD([*body.parameters(), *deep.parameters()], lr=0.1)
second = torch.optim.SGD(head.parameters(), lr=0.1)
{before}
for step in range(4):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
{step}
"""


def script(*lines, before=""):
    return SETUP.format(before=before, step="\n".join(f"    {line}" for line in lines))


FEATURES = "f = torch.tanh(deep(torch.tanh(body(x))))"
LOSS = "loss = F.cross_entropy(head(f), y)"
STEP = ("first.step()", "second.step()", "first.zero_grad()", "second.zero_grad()")
ENCODER = {"body.weight", "body.bias", "deep.weight", "deep.bias"}


# 12


def test_two_losses_share_an_encoder(tmp_path):
    source = script(
        FEATURES, LOSS, "loss.backward()", "f.square().mean().backward()  # FAULT", *STEP
    )
    finding = only(tmp_path, source, 12)
    assert set(finding.parameters) == ENCODER
    assert {s.line for s in finding.related} == {15, 17}  # the forward, the first backward
    assert "TanhBackward0" in finding.why


def test_the_same_loss_twice(tmp_path):
    only(tmp_path, script(FEATURES, LOSS, "loss.backward()", "loss.backward()  # FAULT", *STEP), 12)


def test_the_error_carries_the_finding(tmp_path):
    examination, _ = look(
        tmp_path, script(FEATURES, LOSS, "loss.backward()", "loss.backward()", *STEP)
    )
    assert any("12 second-backward" in note for note in examination.error.__notes__)


@pytest.mark.parametrize(
    "lines",
    [
        ("loss.backward(retain_graph=True)", "f.square().mean().backward()"),
        ("(loss + f.square().mean()).backward()",),
        ("loss.backward()", "deep(body(x)).square().mean().backward()"),
    ],
    ids=["retained", "summed", "computed-again"],
)
def test_sharing_that_works(tmp_path, lines):
    nothing(tmp_path, script(FEATURES, LOSS, *lines, *STEP))


# 13


@pytest.mark.parametrize(
    "line",
    [
        "f += 1  # FAULT",
        "f[:, 0] = 0.0  # FAULT",
        "f.mul_(2.0)  # FAULT",
        "f = F.relu(f, inplace=True)  # FAULT",
        "f[0].zero_()  # FAULT",
        "torch.add(f.detach(), 1.0, out=f.detach())  # FAULT",
    ],
)
def test_changed_in_place(tmp_path, line):
    finding = only(tmp_path, script(FEATURES, line, LOSS, "loss.backward()", *STEP), 13)
    assert finding.severity is Severity.ERROR
    assert "[8, 8]" in finding.what


@pytest.mark.parametrize("line", ["f = f + 1", "f = f.clone().mul_(2.0)", "f = body(x).relu_()"])
def test_changes_that_autograd_allows(tmp_path, line):
    make = FEATURES if "body" not in line else "f = None"
    nothing(tmp_path, script(make, line, "f = deep(f)", LOSS, "loss.backward()", *STEP))


def test_a_step_between_two_backwards(tmp_path):
    source = script(
        FEATURES,
        LOSS,
        "f.square().mean().backward(retain_graph=True)",
        "first.step()  # FAULT",
        "loss.backward()",
        "second.step()",
    )
    finding = only(tmp_path, source, 13)
    assert set(finding.parameters) == ENCODER
    assert "deep.weight" in finding.why


def test_weights_clipped_before_the_backward(tmp_path):
    source = script(
        FEATURES,
        LOSS,
        "with torch.no_grad():",
        "    head.weight.clamp_(-1, 1)  # FAULT",
        "loss.backward()",
        *STEP,
    )
    assert set(only(tmp_path, source, 13).parameters) == {"head.weight"}


def test_weights_clipped_after_the_step(tmp_path):
    clip = ("with torch.no_grad():", "    head.weight.clamp_(-1, 1)")
    nothing(tmp_path, script(FEATURES, LOSS, "loss.backward()", *STEP, *clip))


def test_a_leaf_changed_while_recording(tmp_path):
    source = script("head.weight.mul_(0.9)  # FAULT", FEATURES, LOSS, "loss.backward()", *STEP)
    assert set(only(tmp_path, source, 13).parameters) == {"head.weight"}


# 14


def test_a_cached_tensor_with_its_graph(tmp_path):
    source = script(
        "if step == 0: kept = body(x)",
        "f = torch.tanh(deep(kept))  # FAULT",
        LOSS,
        "loss.backward()",
        *STEP,
    )
    finding = only(tmp_path, source, 14)
    assert set(finding.parameters) == {"body.weight", "body.bias"}
    assert finding.severity is Severity.ERROR


def test_a_cached_tensor_and_a_retained_graph(tmp_path):
    # silent: the first layer saves nothing that the step has changed
    source = script(
        "if step == 0: kept = body(x)",
        "f = torch.tanh(deep(kept))  # FAULT",
        LOSS,
        "loss.backward(retain_graph=True)",
        *STEP,
    )
    finding = only(tmp_path, source, 14)
    assert finding.severity is Severity.WARNING


def test_a_cached_tensor_of_changed_weights(tmp_path):
    source = script(
        "if step == 0: kept = deep(body(x))",
        "f = torch.tanh(kept)  # FAULT",
        LOSS,
        "loss.backward(retain_graph=True)",
        *STEP,
    )
    finding = only(tmp_path, source, 14)
    assert finding.severity is Severity.ERROR


def test_a_recurrent_state_over_steps(tmp_path):
    source = """
cell, head = nn.GRUCell(4, 8), nn.Linear(8, 3)
optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1)
state = torch.zeros(8, 8)
for step in range(4):
    state = cell(torch.randn(8, 4), state{detached}){mark}
    loss = F.cross_entropy(head(state), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    only(tmp_path, source.format(detached="", mark="  # FAULT"), 14)
    nothing(tmp_path, source.format(detached=".detach()", mark=""))


def test_the_state_of_an_lstm_that_the_loop_carries(tmp_path):
    """The freed part begins inside of the LSTM, in a node that no operation is known by."""
    source = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
    def forward(self, ids, state):
        hidden, state = self.rnn(self.embed(ids), state)
        return self.out(hidden), state
model, state = Model(), None
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    ids = torch.randint(0, 11, (4, 6))
    logits, state = model(ids, state)  # FAULT
    loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    only(tmp_path, source, 14)
    cut = "state = state and tuple(s.detach() for s in state)"
    call = "logits, state = model(ids, state)"
    nothing(tmp_path, source.replace(call, f"{cut}\n    {call}").replace("  # FAULT", ""))


KEPT = """
maker, judge = nn.Linear(4, 8), nn.Linear(8, 3)
optimizer = torch.optim.SGD([*maker.parameters(), *judge.parameters()], lr=0.1)
def features(x):
    return torch.tanh(maker(x))
pool = []
for step in range(4):
    pool.append(features(torch.randn(8, 4)){detached})
    seen = torch.cat(pool[-2:]){mark}
    loss = F.cross_entropy(judge(seen), torch.randint(0, 3, (len(seen),)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_helper_that_made_the_old_value_and_a_new_one(tmp_path):
    """The helper is not to blame: what was kept is named where it is used."""
    finding = only(tmp_path, KEPT.format(detached="", mark="  # FAULT"), 14)
    assert finding.severity is Severity.ERROR
    detached = KEPT.format(detached=".detach()", mark="")
    assert not [f for f in look(tmp_path, detached)[0].findings if f.number == 14]


@pytest.mark.parametrize("value", ["loss", "0.5 * loss"])
def test_a_running_loss_keeps_all_graphs(tmp_path, value):
    lines = (FEATURES, LOSS, "loss.backward()", *STEP)
    source = script(*lines, f"total = total + {value}  # FAULT", before="total = 0.0")
    finding = only(tmp_path, source, 14)
    assert "memory" in finding.why
    for clean in ("loss.item()", "loss.detach()"):
        nothing(tmp_path, source.replace(f"+ {value}", f"+ {clean}"))


def test_metrics_after_the_step(tmp_path):
    nothing(tmp_path, script(FEATURES, LOSS, "loss.backward()", *STEP, "print((2 * loss).item())"))


def test_steps_that_the_user_counts():
    body = nn.Linear(4, 4)
    sgd = torch.optim.SGD(body.parameters(), lr=0.1)
    with Doctor(modules={"body": body}, optimizers={"sgd": sgd}) as doctor:
        kept = body(torch.ones(2, 4)).tanh()
        for _ in range(2):
            kept.sum().backward(retain_graph=True)
            sgd.step()
            doctor.step()
    (finding,) = [f for f in doctor.findings if f.severity >= Severity.WARNING]
    assert finding.number == 14
    assert "A tensor of step 0 is used in step 1" in finding.what


TURNS = """
maker, judge = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
makes = torch.optim.Adam(maker.parameters())
judges = torch.optim.Adam(judge.parameters())
fake = None
for step in range(7):
    {fake}
    loss = judge(fake.detach()).mean() - judge(torch.randn(8, 4)).mean()
    judges.zero_grad()
    loss.backward()
    judges.step()
    if step % {often} == {often} - 1:
        loss = -judge(fake).mean(){mark}
        makes.zero_grad()
        loss.backward({retain})
        makes.step()
"""
FAKE = "fake = maker(torch.randn(8, 2))"


@pytest.mark.parametrize("often", [1, 2, 3])
def test_optimizers_that_take_turns(tmp_path, often):
    nothing(tmp_path, TURNS.format(fake=FAKE, often=often, mark="", retain=""))


@pytest.mark.parametrize("often", [1, 2])
def test_a_fake_of_weights_that_were_stepped(tmp_path, often):
    fake = f"if step < {often}: {FAKE}"
    source = TURNS.format(fake=fake, often=often, mark="  # FAULT", retain="retain_graph=True")
    finding = only(tmp_path, source, 14)
    assert set(finding.parameters) == {"maker.weight", "maker.bias"}


@pytest.mark.parametrize(
    "kept",
    [
        "before = out",
        "before = 0.9 * before + 0.1 * out",
        "before = torch.cat([out, before])[:8]",
    ],
)
def test_the_variable_that_takes_a_value_over_is_the_line_to_change(kept, tmp_path):
    source = """
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters())
before = torch.zeros(8, 3)
for step in range(4):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    out = model(x)
    loss = F.cross_entropy(out, y) + 0.1 * F.mse_loss(out, before)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {kept}  # FAULT
"""
    assert only(tmp_path, source.format(kept=kept), 14)
    nothing(tmp_path, source.format(kept=kept.replace("out", "out.detach()")))
