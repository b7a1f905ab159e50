"""Classes 4, 6, 7, 8 and 9: each rule with its fault and with the code that only looks like it."""

import copy

import pytest
import torch
from torch import nn

from doctor.snippets import look, loop, nothing, only
from gradient_doctor import Doctor, Severity

BODY = {"body.weight", "body.bias"}
HEAD = {"head.weight", "head.bias"}


def script(make="", forward="", step="", optimizer=None):
    """A training loop with one part replaced; the lines are indented as their place needs it."""
    optimizer = (
        optimizer or "optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])"
    )
    forward = forward or "loss = F.cross_entropy(head(torch.tanh(body(x))), y)"
    step = step or "optimizer.zero_grad()\nloss.backward()\noptimizer.step()"
    inner = "\n".join(f"    {line}" for line in f"{forward}\n{step}".splitlines())
    return (
        "body, head = nn.Linear(4, 8), nn.Linear(8, 3)\n"
        f"{make}\n{optimizer}\n"
        "for step in range(4):\n"
        "    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))\n"
        f"{inner}\n"
    )


def names(finding):
    return set(finding.parameters)


# 4


@pytest.mark.parametrize(
    "line",
    [
        "body.requires_grad_(False)  # FAULT",
        "for p in body.parameters(): p.requires_grad = False  # FAULT",
        "for p in body.parameters(): p.requires_grad_(False)  # FAULT",
    ],
)
def test_frozen_against_the_contract(tmp_path, line):
    finding = only(tmp_path, script(line), 4, contract={"trainable": ["body.*"]})
    assert names(finding) == BODY
    assert finding.severity is Severity.ERROR


def test_frozen_on_purpose_is_a_note(tmp_path):
    examination, _ = look(tmp_path, script("body.requires_grad_(False)"))
    assert [(f.number, f.severity) for f in examination.findings] == [(4, Severity.NOTE)]


def test_unfrozen_again(tmp_path):
    make = "body.requires_grad_(False)\nbody.requires_grad_(True)"
    nothing(tmp_path, script(make), contract={"trainable": ["body.*"]})


def test_an_optimizer_of_frozen_parameters_only(tmp_path):
    source = script(
        "body.requires_grad_(False)  # FAULT",
        optimizer="optimizer = torch.optim.Adam(head.parameters())\n"
        "second = torch.optim.Adam(body.parameters())",
        step="optimizer.zero_grad()\nloss.backward()\noptimizer.step()\nsecond.step()",
    )
    assert names(only(tmp_path, source, 4)) == BODY


ADAPTED = """
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 3)
        self.lora_A, self.lora_B = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))
model, reference = Adapted(), Adapted().requires_grad_(False)
model.base.requires_grad_(False)
{line}
head = nn.Linear(3, 3)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
for step in range(4):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    loss = F.cross_entropy(head(model(x) - reference(x)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_adapters_loaded_for_inference(tmp_path):
    line = "for p in model.parameters(): p.requires_grad = False  # FAULT"
    finding = only(tmp_path, ADAPTED.format(line=line), 4)
    assert names(finding) == {"model.lora_A.weight", "model.lora_B.weight"}
    assert "0 of the 2" in finding.what


def test_trainable_adapters_and_a_frozen_reference(tmp_path):
    nothing(tmp_path, ADAPTED.format(line=""))


@pytest.mark.parametrize(
    ("contract", "number"),
    [
        ({"trainable": ["body.*", "hed.*"]}, 4),
        ({"frozen": ["hed.*"]}, 4),
        ({"dtype": {"hed.*": "float32"}}, 16),
    ],
)
def test_a_contract_that_names_nothing(tmp_path, contract, number):
    """A pattern with a spelling mistake guards nothing, and must not look green."""
    examination, _ = look(tmp_path, script(), contract=contract)
    [finding] = examination.findings
    assert (finding.number, finding.severity) == (number, Severity.WARNING)
    assert finding.what.startswith("`hed.*` of the contract's ")
    assert "body.weight" in finding.why


def test_the_contract_says_frozen(tmp_path):
    examination, _ = look(tmp_path, script(), contract={"frozen": ["body.*"]})
    (finding,) = examination.findings
    assert (finding.number, names(finding)) == (4, BODY)
    nothing(tmp_path, script("body.requires_grad_(False)"), contract={"frozen": ["body.*"]})


# 6


def test_a_layer_made_in_a_function(tmp_path):
    forward = (
        "f = nn.Linear(8, 8)(torch.tanh(body(x)))  # FAULT\nloss = F.cross_entropy(head(f), y)"
    )
    finding = only(tmp_path, script(forward=forward), 6)
    assert "[8, 8], [8]" in finding.what


def test_a_bare_parameter_in_one_step(tmp_path):
    source = script(
        forward="w = nn.Parameter(torch.ones(8))  # FAULT\n"
        "loss = F.cross_entropy(head(body(x) * w), y)"
    )
    only(tmp_path, source.replace("range(4)", "range(2)"), 6)


def test_a_lazily_made_layer_lasts(tmp_path):
    source = script(
        make="extra = None",
        forward="if extra is None:\n"
        "    extra = nn.Linear(8, 8)\n"
        "    optimizer.add_param_group({'params': extra.parameters()})\n"
        "loss = F.cross_entropy(head(extra(body(x))), y)",
    )
    nothing(tmp_path, source)


def test_an_attack_on_the_input_is_no_layer(tmp_path):
    source = script(
        forward="delta = nn.Parameter(torch.zeros(8, 4))\n"
        "F.cross_entropy(head(body(x + delta)), y).backward()\n"
        "x = x + 0.1 * delta.grad.sign()\n"
        "loss = F.cross_entropy(head(body(x)), y)"
    )
    nothing(tmp_path, source)


# 7


def test_a_module_forgotten_in_the_optimizer(tmp_path):
    source = script(optimizer="optimizer = torch.optim.Adam(head.parameters())  # FAULT")
    assert names(only(tmp_path, source, 7)) == BODY


def test_layers_in_a_plain_list(tmp_path):
    source = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(4, 4)]  # FAULT
        self.head = nn.Linear(4, 3)
    def forward(self, x):
        return self.head(self.layers[0](x))
model = Net()
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    finding = only(tmp_path, source, 7)
    assert len(finding.parameters) == 2
    assert "No module has them registered" in finding.why


def test_made_after_the_optimizer(tmp_path):
    source = script(
        step="optimizer.zero_grad()\nloss.backward()\noptimizer.step()",
        optimizer="optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])\n"
        "scale = nn.Linear(3, 3)  # FAULT",
        forward="loss = F.cross_entropy(scale(head(body(x))), y)",
    )
    finding = only(tmp_path, source, 7)
    assert "made after optimizer" in finding.why
    assert names(finding) == {"scale.weight", "scale.bias"}


def test_updated_by_hand_is_owned(tmp_path):
    source = script(
        optimizer="optimizer = torch.optim.Adam(head.parameters())",
        step="optimizer.zero_grad()\nloss.backward()\noptimizer.step()\n"
        "for p in body.parameters():\n    p.data -= 0.1 * p.grad\n    p.grad = None",
    )
    nothing(tmp_path, source)


def test_inputs_that_ask_for_a_gradient(tmp_path):
    forward = "x.requires_grad_()\nloss = F.cross_entropy(head(body(x)), y)"
    nothing(tmp_path, script(forward=forward))


# 8


def test_the_optimizer_of_another_instance(tmp_path):
    source = script(
        make="old = nn.Linear(4, 8)",
        optimizer="optimizer = torch.optim.Adam([*old.parameters(), *head.parameters()])  # FAULT",
    )
    finding = only(tmp_path, source, 8)
    assert names(finding) == BODY
    assert "owns 4 parameters, of which 2" in finding.why


def test_a_head_with_more_classes(tmp_path):
    source = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
    def forward(self, x):
        return self.head(self.body(x))
model = Net()
optimizer = torch.optim.Adam(model.parameters())
model.head = nn.Linear(4, 5)  # FAULT
for step in range(4):
    loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 5, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    assert names(only(tmp_path, source, 8)) == {"model.head.weight", "model.head.bias"}


def test_a_state_of_other_shapes():
    small, large = nn.Linear(4, 3), nn.Linear(4, 5)
    first, second = torch.optim.Adam(small.parameters()), torch.optim.Adam(large.parameters())
    small(torch.ones(2, 4)).sum().backward()
    first.step()
    with Doctor(modules={"large": large}, optimizers={"second": second}) as doctor:
        second.load_state_dict(first.state_dict())
        large(torch.ones(2, 4)).sum().backward()
        with pytest.raises(RuntimeError):
            second.step()
    (finding,) = [f for f in doctor.findings if f.number == 8]
    assert names(finding) == {"large.weight", "large.bias"}
    assert "exp_avg has [3, 4]" in finding.why


def test_a_state_for_other_names():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    forwards = torch.optim.Adam(list(model.named_parameters()))
    backwards = torch.optim.Adam(list(model.named_parameters())[::-1])
    with Doctor(modules={"model": model}, optimizers={"adam": backwards}) as doctor:
        backwards.load_state_dict(copy.deepcopy(backwards.state_dict()))
        assert not doctor.findings
        backwards.load_state_dict(forwards.state_dict())
    assert [f.number for f in doctor.findings] == [8]


def test_target_networks_are_nobodys(tmp_path):
    source = script(
        make="target = copy.deepcopy(body).requires_grad_(False)",
        forward="with torch.no_grad():\n    goal = target(x)\n"
        "f = body(x)\nloss = F.cross_entropy(head(f), y) + F.mse_loss(f, goal)",
        step="optimizer.zero_grad()\nloss.backward()\noptimizer.step()\n"
        "with torch.no_grad():\n"
        "    for t, p in zip(target.parameters(), body.parameters()):\n        t.lerp_(p, 0.1)",
    )
    nothing(tmp_path, source)


LIVE_TARGET = """
body = nn.Linear(4, 3)
target = nn.Linear(4, 3)
target.load_state_dict(body.state_dict())
optimizer = torch.optim.SGD(body.parameters(), lr=0.1)  # FAULT
for step in range(8):
    x = torch.randn(8, 4)
    loss = (body(x)[:, 0] - (1 + 0.9 * target(x).max(1)[0])).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        SYNC
"""


def test_a_target_that_stays_in_the_graph_and_is_refreshed_later(tmp_path):
    nothing(tmp_path, LIVE_TARGET.replace("SYNC", "target.load_state_dict(body.state_dict())"))


def test_a_copy_that_nobody_refreshes(tmp_path):
    finding = only(tmp_path, LIVE_TARGET.replace("SYNC", "pass"), 7)
    assert names(finding) == {"target.weight", "target.bias"}


def test_a_replaced_weight_stays_in_the_optimizer(tmp_path):
    """Tied after the optimizer was made: it keeps stepping a tensor that no model has."""
    make = "last = nn.Linear(8, 8)\nend = nn.Linear(8, 8)"
    optimizer = (
        "parts = nn.ModuleList([body, head, last, end])\n"
        "optimizer = torch.optim.Adam(parts.parameters())  # FAULT\n"
        "{tie}"
    )
    forward = "loss = F.cross_entropy(head(end(last(torch.tanh(body(x))))), y)"
    tied = optimizer.format(tie="end.weight = last.weight")
    finding = only(tmp_path, script(make, forward, optimizer=tied), 8)
    assert "[8, 8]" in finding.what
    nothing(tmp_path, script(make, forward, optimizer=optimizer.format(tie="pass")))


# 9

ERASING = {
    "optimizer": "loss.backward()\noptimizer.zero_grad()  # FAULT\noptimizer.step()",
    "modules": "loss.backward()\nbody.zero_grad(); head.zero_grad()  # FAULT\noptimizer.step()",
    "set-none": "loss.backward()\nfor p in both: p.grad = None  # FAULT\noptimizer.step()",
    "zero_": "loss.backward()\nfor p in both: p.grad.zero_()  # FAULT\noptimizer.step()",
}


@pytest.mark.parametrize("step", ERASING.values(), ids=ERASING)
def test_erased_before_the_step(tmp_path, step):
    source = script(make="both = [*body.parameters(), *head.parameters()]", step=step)
    examination, lines = look(tmp_path, source)
    found = [f for f in examination.findings if f.number == 9]
    assert {f.severity for f in found} == {Severity.ERROR}
    assert set().union(*map(names, found)) == BODY | HEAD
    assert {f.site.line for f in found} <= set(lines)


@pytest.mark.parametrize("how", ["p.grad = None", "p.grad.zero_()"])
def test_a_part_picked_by_name_is_frozen_so(how, tmp_path):
    step = (
        "optimizer.zero_grad()\n"
        "loss.backward()\n"
        "for name, p in both.named_parameters():\n"
        "    if '1.' in name:\n"
        f"        {how}\n"
        "optimizer.step()"
    )
    nothing(tmp_path, script(make="both = nn.Sequential(body, head)", step=step))


@pytest.mark.parametrize("whose", ["both", "body"])
def test_what_no_name_picks_is_no_freeze(whose, tmp_path):
    step = (
        "optimizer.zero_grad()\n"
        "loss.backward()\n"
        f"for name, p in {whose}.named_parameters():\n"
        "    if p.grad is not None: p.grad = None  # FAULT\n"
        "optimizer.step()"
    )
    finding = only(tmp_path, script(make="both = nn.Sequential(body, head)", step=step), 9)
    assert finding.severity is Severity.ERROR


def test_only_the_last_micro_batch_counts(tmp_path):
    step = (
        "for part, label in zip(x.chunk(2), y.chunk(2)):\n"
        "    optimizer.zero_grad()  # FAULT\n"
        "    F.cross_entropy(head(body(part)), label).backward()\n"
        "optimizer.step()"
    )
    finding = only(tmp_path, script(step=step), 9)
    assert finding.severity is Severity.WARNING


def test_accumulation_keeps_everything(tmp_path):
    step = (
        "optimizer.zero_grad()\n"
        "for part, label in zip(x.chunk(2), y.chunk(2)):\n"
        "    F.cross_entropy(head(body(part)), label).backward()\n"
        "optimizer.step()"
    )
    nothing(tmp_path, script(step=step))


def test_one_of_two_losses_is_wiped(tmp_path):
    step = (
        "optimizer.zero_grad()\n"
        "loss.backward()\n"
        "body.zero_grad()  # FAULT\n"
        "body(x).square().mean().backward()\n"
        "optimizer.step()"
    )
    finding = only(tmp_path, script(step=step), 9)
    assert names(finding) == BODY
    assert finding.severity is Severity.WARNING


def test_adversarial_training_erases_by_products(tmp_path):
    source = script(
        optimizer="critic = torch.optim.Adam(head.parameters())\n"
        "actor = torch.optim.Adam(body.parameters())",
        step="critic.zero_grad()\n"
        "F.cross_entropy(head(body(x).detach()), y).backward()\ncritic.step()\n"
        "actor.zero_grad()\n(-F.cross_entropy(head(body(x)), y)).backward()\nactor.step()",
    )
    nothing(tmp_path, source)


def test_sharpness_aware_steps_read_before_they_erase(tmp_path):
    step = (
        "optimizer.zero_grad()\nloss.backward()\n"
        "shifts = [0.01 * p.grad for p in body.parameters()]\n"
        "with torch.no_grad():\n    for p, s in zip(body.parameters(), shifts): p.add_(s)\n"
        "body.zero_grad()\n"
        "F.cross_entropy(head(torch.tanh(body(x))), y).backward()\n"
        "with torch.no_grad():\n    for p, s in zip(body.parameters(), shifts): p.sub_(s)\n"
        "optimizer.step()"
    )
    nothing(tmp_path, script(step=step))


def test_a_skipped_bad_batch_is_no_erasure(tmp_path):
    step = (
        "optimizer.zero_grad()\nloss.backward()\n"
        "if step == 1:\n    optimizer.zero_grad()\n    continue\n"
        "optimizer.step()"
    )
    nothing(tmp_path, script(step=step))


def test_zero_grad_after_the_step(tmp_path):
    nothing(tmp_path, script(step="loss.backward()\noptimizer.step()\noptimizer.zero_grad()"))


# parts that are exchanged in the middle of training

EXCHANGED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))
model = Model()
optimizer = torch.optim.Adam(model.parameters())
for step in range(11):
    if step == 6:
        head = nn.Linear(8, 3)
        with torch.no_grad():
            head.weight.copy_(model.head.weight)
        model.head = head  # FAULT
        {line}
    loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_layer_exchanged_between_two_looks(tmp_path):
    finding = only(tmp_path, EXCHANGED.format(line="pass"), 8)
    assert names(finding) == {"model.head.weight", "model.head.bias"}


@pytest.mark.parametrize(
    "line",
    [
        "optimizer = torch.optim.Adam(model.parameters())",
        "optimizer.add_param_group({'params': head.parameters()})",
        "head.requires_grad_(False)",
    ],
)
def test_a_layer_exchanged_and_cared_for(tmp_path, line):
    nothing(tmp_path, EXCHANGED.format(line=line))


# random layers that are frozen behind what trains

DEEP = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))
model = Model()
{freeze}
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
for step in range(4):
    loss = F.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_random_head_that_is_frozen(tmp_path):
    freeze = "for p in model.last.parameters(): p.requires_grad = False  # FAULT"
    finding = only(tmp_path, DEEP.format(freeze=freeze), 4)
    assert names(finding) == {"model.last.weight"}


@pytest.mark.parametrize(
    "freeze",
    [
        "model.first.requires_grad_(False)",
        "model.last.load_state_dict(nn.Linear(8, 3).state_dict())\n"
        "model.last.requires_grad_(False)",
        "model.last.requires_grad_(False)\nmodel.last.bias.requires_grad_(True)",
        "model.requires_grad_(False)\nmodel.first = nn.Sequential()\n"
        "model.first.adapter = nn.Linear(4, 8)",
        "model.requires_grad_(False)\nmodel.first = nn.Sequential(model.first, nn.Linear(8, 8))",
    ],
    ids=["body", "loaded", "bias-only", "adapter", "between"],
)
def test_layers_that_may_be_frozen(tmp_path, freeze):
    nothing(tmp_path, DEEP.format(freeze=freeze))


REMADE = """
class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.make = nn.Linear(4, 12)
        self.out = nn.Linear(4, 3, bias=False)

    def forward(self, x):
        return F.linear(x, self.weights(x.mean(0)))

    def weights(self, c):
{lines}

model = Cell()
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    loss = F.cross_entropy(model(x), y) + 0.01 * model.out.weight.square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_computed_weight_that_is_made_a_parameter_is_cut_off(tmp_path):
    lines = "        return nn.Parameter(self.make(c).view(3, 4))  # FAULT"
    finding = only(tmp_path, REMADE.format(lines=lines), 3)
    assert "model.make.weight" in finding.parameters


def test_a_computed_weight_that_is_handed_on_is_clean(tmp_path):
    nothing(tmp_path, REMADE.format(lines="        return self.make(c).view(3, 4)"))


def test_a_parameter_that_begins_with_a_computed_value_is_clean(tmp_path):
    source = loop("loss = F.cross_entropy(head(body(x)), y)") + (
        "merged = nn.Parameter(head.weight @ body.weight)\n"
        "optimizer = torch.optim.Adam([merged])\n"
        "for step in range(4):\n"
        "    loss = F.cross_entropy(torch.randn(8, 4) @ merged.t(), y)\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    nothing(tmp_path, source)
