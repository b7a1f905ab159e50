"""Classes 15, 16 and 21: each rule with its fault and with the code that only looks like it."""

import pytest
import torch
from torch import nn

from doctor.snippets import look, nothing, only
from gradient_doctor import Doctor, Severity

ALL = {"body.weight", "body.bias", "head.weight", "head.bias"}
BODY = {"body.weight", "body.bias"}


def script(
    make="",
    optimizer="optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-2)",
    forward="loss = F.cross_entropy(head(torch.tanh(body(x))), y)",
    step="optimizer.zero_grad()\nloss.backward()\noptimizer.step()",
):
    inner = "\n".join(f"    {line}" for line in f"{forward}\n{step}".splitlines())
    return (
        "body, head = nn.Linear(4, 8), nn.Linear(8, 3)\n"
        f"{make}\n{optimizer}\n"
        "for step in range(4):\n"
        "    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))\n"
        f"{inner}\n"
    )


SCALED = (
    "optimizer.zero_grad()\nscaler.scale(loss).backward()\nscaler.step(optimizer)\nscaler.update()"
)
SCALER = "scaler = torch.amp.GradScaler('cpu', init_scale=64.0)"
HALF = "loss = F.cross_entropy(head(torch.tanh(body(x.half())).float()), y)"

# 15


@pytest.mark.parametrize(
    "line",
    [
        "body.half()  # FAULT",
        "body.to(torch.float16)  # FAULT",
        "body = body.to(dtype=torch.half)  # FAULT",
    ],
)
def test_half_weights_under_a_scaler(tmp_path, line):
    source = script(f"{line}\n{SCALER}", forward=HALF, step=SCALED)
    finding = only(tmp_path, source, 15)
    assert set(finding.parameters) == BODY
    assert finding.severity is Severity.ERROR


def test_the_error_of_unscale_carries_the_finding(tmp_path):
    examination, _ = look(tmp_path, script(f"body.half()\n{SCALER}", forward=HALF, step=SCALED))
    assert any("15 scaler-dtype" in note for note in examination.error.__notes__)


def test_half_weights_are_found_before_the_first_step():
    body = nn.Linear(4, 4).half()
    adam = torch.optim.Adam(body.parameters())
    scaler = torch.amp.GradScaler("cpu")
    with Doctor({"body": body}, {"adam": adam}, scaler) as doctor:
        assert [f.number for f in doctor.findings] == [15]


def test_bfloat16_under_a_scaler_is_a_warning(tmp_path):
    make = f"body.bfloat16(); head.bfloat16()  # FAULT\n{SCALER}"
    forward = "loss = F.cross_entropy(head(torch.tanh(body(x.bfloat16()))).float(), y)"
    finding = only(tmp_path, script(make, forward=forward, step=SCALED), 15)
    assert finding.severity is Severity.WARNING


@pytest.mark.parametrize(
    ("make", "forward"),
    [
        ("body.half().requires_grad_(False)", HALF),  # a frozen base in fp16
        ("", "with torch.autocast('cpu', torch.float16):\n    o = head(body(x))\n"
             "loss = F.cross_entropy(o.float(), y)"),
    ],
    ids=["frozen", "autocast"],
)  # fmt: skip
def test_float32_weights_under_a_scaler(tmp_path, make, forward):
    optimizer = (
        "both = [*body.parameters(), *head.parameters()]\n"
        "optimizer = torch.optim.SGD([p for p in both if p.requires_grad], lr=0.1)"
    )
    nothing(tmp_path, script(f"{make}\n{SCALER}", optimizer, forward, SCALED))


def test_a_disabled_scaler_asks_for_nothing(tmp_path):
    make = "body.half()\nscaler = torch.amp.GradScaler('cpu', enabled=False)"
    optimizer = "optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)"
    nothing(tmp_path, script(make, optimizer, HALF, SCALED))


# 16


def test_another_dtype_than_the_contract_asks_for(tmp_path):
    contract = {"dtype": {"body.*": "float32"}}
    source = script("body.bfloat16()  # FAULT", forward=HALF.replace("half", "bfloat16"))
    finding = only(tmp_path, source, 16, contract=contract)
    assert set(finding.parameters) == BODY
    assert "should be float32, but are bfloat16" in finding.what
    nothing(tmp_path, script(), contract=contract)
    nothing(tmp_path, source, contract={"dtype": {"body.*": "bfloat16"}})


def test_moved_but_not_converted(tmp_path):
    make = "body.to('cpu')\nbody.double()\nbody.float()"
    nothing(tmp_path, script(make), contract={"dtype": {"*": "float32"}})


CONFIG = """
class Config: dtype = "float32"
class Net(nn.Linear):
    def __init__(self, **options):
        super().__init__(4, 3, **options)  # FAULT
        self.config = Config()
{make}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    o = model(torch.randn(8, 4).to(model.weight.dtype))
    optimizer.zero_grad()
    F.cross_entropy(o.float(), torch.randint(0, 3, (8,))).backward()
    optimizer.step()
"""


def test_another_dtype_than_the_config_says(tmp_path):
    make = "model = Net(dtype=torch.bfloat16)"
    assert set(only(tmp_path, CONFIG.format(make=make), 16).parameters) == {
        "model.weight",
        "model.bias",
    }
    nothing(tmp_path, CONFIG.format(make="model = Net()"))
    # converted by the user, who knows what the config said
    examination, _ = look(tmp_path, CONFIG.format(make="model = Net().bfloat16()"))
    assert {f.severity for f in examination.findings if f.number == 16} == {Severity.NOTE}


# 21


def test_a_learning_rate_of_zero(tmp_path):
    line = (
        "optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=0.0)  # FAULT"
    )
    finding = only(tmp_path, script(optimizer=line), 21)
    assert set(finding.parameters) == ALL
    assert finding.severity is Severity.ERROR


def test_one_group_without_a_rate(tmp_path):
    line = (
        "groups = [{'params': body.parameters(), 'lr': 0.0}, {'params': head.parameters()}]\n"
        "optimizer = torch.optim.SGD(groups, lr=0.1)  # FAULT"
    )
    finding = only(tmp_path, script(optimizer=line), 21)
    assert set(finding.parameters) == BODY
    assert finding.severity is Severity.WARNING


SCHEDULED = (
    "optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)\n"
    "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: {law})  # FAULT"
)
STEPS = "optimizer.zero_grad()\nloss.backward()\noptimizer.step()\nscheduler.step()"


def test_a_schedule_of_zero(tmp_path):
    finding = only(tmp_path, script(optimizer=SCHEDULED.format(law="0 // 10"), step=STEPS), 21)
    assert set(finding.parameters) == ALL


def test_a_warmup_begins_at_zero(tmp_path):
    nothing(tmp_path, script(optimizer=SCHEDULED.format(law="k / 10"), step=STEPS))


def test_updates_rounded_away(tmp_path):
    finding = only(
        tmp_path,
        script(
            "body.bfloat16()  # FAULT",
            "optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-5)",
            forward=HALF.replace("half", "bfloat16"),
        ),
        21,
    )
    assert set(finding.parameters) == BODY
    assert "of the numbers" in finding.what


def test_bfloat16_with_steps_large_enough(tmp_path):
    source = script(
        "body.bfloat16()",
        "optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=3e-2)",
        forward=HALF.replace("half", "bfloat16"),
    )
    nothing(tmp_path, source)


def test_a_rate_too_small_for_float32(tmp_path):
    line = (
        "optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=1e-30)  # FAULT"
    )
    assert set(only(tmp_path, script(optimizer=line), 21).parameters) == ALL


def test_one_tensor_with_gradients_of_noise(tmp_path):
    # the bias in front of a LayerNorm without mean: its gradient is rounding noise
    make = "norm = nn.LayerNorm(8)\nshift = nn.Parameter(torch.full((1,), 3.0))"
    forward = "loss = F.cross_entropy(head(norm(body(x) + shift)), y)"
    optimizer = (
        "rest = [*head.parameters(), *norm.parameters(), shift]\n"
        "optimizer = torch.optim.SGD([*body.parameters(), *rest], lr=1e-3)"
    )
    nothing(tmp_path, script(make, optimizer, forward))


def test_an_optimizer_that_never_steps(tmp_path):
    line = "optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)  # FAULT"
    source = script(optimizer=line, step="optimizer.zero_grad()\nloss.backward()")
    finding = only(tmp_path, source, 21)
    assert "never steps" in finding.what


def test_a_wrapper_that_steps_by_another_optimizer(tmp_path):
    source = script(
        optimizer="""
class Sharp(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {'lr': 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)
    def second_step(self):
        self.base.step()
optimizer = Sharp([*body.parameters(), *head.parameters()])""",
        step="optimizer.zero_grad()\nloss.backward()\noptimizer.second_step()",
    )
    nothing(tmp_path, source)


MIXED = "with torch.autocast('cpu', torch.float16):\n    o = head(torch.tanh(body(x)))\n"
SKIPPED = SCALED.replace("scaler.step(optimizer)", "scaler.step(optimizer)  # FAULT")


def scaled(scale, forward=MIXED + "loss = F.cross_entropy(o.float(), y)"):
    return script(
        f"scaler = torch.amp.GradScaler('cpu', init_scale={scale})", forward=forward, step=SKIPPED
    )


@pytest.mark.parametrize("scale", ["2.0**40", "2.0**127"])
def test_all_steps_skipped_by_the_scaler(tmp_path, scale):
    # in fp16 on the way back, or in the scaled loss itself
    examination, lines = look(tmp_path, scaled(scale).replace("loss = F", "loss = 9 * F"))
    shown = "\n".join(map(str, examination.findings))
    (finding,) = [f for f in examination.findings if f.severity >= Severity.WARNING]
    assert (finding.number, finding.site.line) == (21, lines[0]), shown
    assert set(finding.parameters) == ALL
    assert "skipped 4 of 4 steps" in finding.what
    first = float(eval(scale))
    assert f"Scales seen: {first:g}, {first / 2:g}, {first / 4:g}, {first / 8:g}." in finding.why
    (place,) = [f for f in examination.findings if f.number == 27]
    assert place.severity is Severity.NOTE
    assert place.site in finding.related


@pytest.mark.parametrize(
    "forward",
    [
        # the loss is no number, or its slope is none: no scale would help
        MIXED + "loss = F.cross_entropy(o.float(), y) * float('nan')  # FAULT",
        MIXED + "loss = F.cross_entropy(o.float(), y) + (0.0 * o).float().sum().sqrt()  # FAULT",
    ],
    ids=["loss", "slope"],
)
def test_steps_skipped_for_another_reason(tmp_path, forward):
    source = scaled("64.0", forward).replace("step(optimizer)  # FAULT", "step(optimizer)")
    finding = only(tmp_path, source, 27)
    assert finding.severity is Severity.ERROR
    assert "the scaler skips them all" in finding.what


def test_a_scaler_that_finds_its_scale(tmp_path):
    source = scaled("2.0**20").replace("range(4)", "range(8)")
    examination, _ = look(tmp_path, source)
    assert not [f for f in examination.findings if f.number in (21, 27)]


def test_a_long_run_of_skipped_steps_is_told_before_its_end():
    body = nn.Linear(4, 4)
    sgd = torch.optim.SGD(body.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    with Doctor({"body": body}, {"sgd": sgd}, scaler, every=4) as doctor:
        for _ in range(16):
            sgd.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = body(torch.ones(2, 4)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(sgd)
            scaler.update()
            doctor.step()
        found = [f for f in doctor.findings if f.severity >= Severity.WARNING]
        assert [f.number for f in found] == [21]
    assert [f.number for f in doctor.findings if f.severity >= Severity.WARNING] == [21]
