"""Class 31: rates that fall to nothing, schedulers that are stepped too often or too early."""

import pytest

from doctor.look import look
from doctor.snippets import nothing, only
from gradient_doctor import Severity

LOOP = """
from torch.optim import lr_scheduler
net = nn.Linear(4, 3)
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
{make}
for step in range({steps}):
    loss = F.cross_entropy(net(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
    sgd.zero_grad()
{body}
"""
PLAIN = "loss.backward()\nsgd.step()\nscheduler.step()"


def loop(make, body=PLAIN, steps=16):
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return LOOP.format(make=make, body=lines, steps=steps)


EPOCHS = "scheduler = lr_scheduler.StepLR(sgd, step_size=2, gamma=0.1)"
FAULTS = {
    "per-batch": (EPOCHS, "loss.backward()\nsgd.step()\nscheduler.step()  # FAULT"),
    "over-after-one": (
        "scheduler = lr_scheduler.LambdaLR(sgd, lambda k: 1 // (k + 1))",
        "loss.backward()\nsgd.step()\nscheduler.step()  # FAULT",
    ),
    "per-epoch-and-too-steep": (
        "scheduler = lr_scheduler.ExponentialLR(sgd, 1e-4)  # FAULT",
        "loss.backward()\nsgd.step()\nif step % 4 == 3: scheduler.step()",
    ),
    "a-rate-for-a-factor": (
        "scheduler = lr_scheduler.LambdaLR(sgd, lambda k: 1e-3 * 0.9**k)  # FAULT",
        PLAIN,
    ),
    "per-micro-batch": (
        "scheduler = lr_scheduler.CosineAnnealingLR(sgd, 60)",
        "for part in range(3):\n"
        "    (net(torch.randn(8, 4)).square().mean() / 3).backward()\n"
        "    scheduler.step()  # FAULT\n"
        "sgd.step()",
    ),
    "before-the-optimizer": (
        "scheduler = lr_scheduler.LinearLR(sgd, 0.1, total_iters=5)",
        "loss.backward()\nscheduler.step()  # FAULT\nsgd.step()",
    ),
}
CLEAN = {
    "cosine-to-zero": "scheduler = lr_scheduler.CosineAnnealingLR(sgd, 16)",
    "warm-up-from-zero": "scheduler = lr_scheduler.LambdaLR(sgd, lambda k: min(1.0, k / 8))",
    "a-long-warm-up": "scheduler = lr_scheduler.LambdaLR(sgd, lambda k: (k + 1) / 100_000)",
    "one-cycle": "scheduler = lr_scheduler.OneCycleLR(sgd, 0.1, total_steps=16)",
    "in-sequence": "scheduler = lr_scheduler.SequentialLR(sgd, [lr_scheduler.ConstantLR(sgd), "
    "lr_scheduler.CosineAnnealingLR(sgd, 8)], [4])",
    "chained": "scheduler = lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(sgd), "
    "lr_scheduler.ExponentialLR(sgd, 0.9)])",
    "warm-restarts": "scheduler = lr_scheduler.CosineAnnealingWarmRestarts(sgd, 4)",
}


@pytest.mark.parametrize(("make", "body"), FAULTS.values(), ids=FAULTS)
def test_out_of_step(tmp_path, make, body):
    finding = only(tmp_path, loop(make, body), 31)
    assert finding.parameters == ("net.weight", "net.bias")


@pytest.mark.parametrize("make", CLEAN.values(), ids=CLEAN)
def test_in_step(tmp_path, make):
    nothing(tmp_path, loop(make))


def test_a_plateau_has_its_reason(tmp_path):
    make = "scheduler = lr_scheduler.ReduceLROnPlateau(sgd, factor=1e-4, patience=0)"
    body = "loss.backward()\nsgd.step()\nif step == 3: scheduler.step(1.0); scheduler.step(2.0)"
    nothing(tmp_path, loop(make, body))


def test_a_rate_of_zero_is_an_error(tmp_path):
    make, body = FAULTS["over-after-one"]
    finding = only(tmp_path, loop(make, body), 31)
    assert finding.severity is Severity.ERROR
    assert finding.what == "15 of 16 updates of the optimizer sgd had a learning rate of 0."


def test_a_resumed_schedule_is_wound_forward(tmp_path):
    make = (
        "scheduler = lr_scheduler.CosineAnnealingLR(sgd, 40)\nfor _ in range(5): scheduler.step()"
    )
    nothing(tmp_path, loop(make))


def test_a_plateau_for_an_accuracy_that_is_given_a_loss(tmp_path):
    make = "scheduler = lr_scheduler.ReduceLROnPlateau(sgd, 'max', patience=1)  # FAULT"
    body = "loss = net(torch.ones(8, 4)).square().mean()\nloss.backward()\nsgd.step()\n"
    only(tmp_path, loop(make, body + "scheduler.step(loss.item())"), 31)


@pytest.mark.parametrize("rate", ["group['lr'] * 0.1**step", "0.1 * (step // 20)"])
def test_a_rate_that_is_set_by_hand(tmp_path, rate):
    by_hand = f"for group in sgd.param_groups: group['lr'] = {rate}  # FAULT"
    body = f"{by_hand}\nloss.backward()\nsgd.step()"
    only(tmp_path, loop("", body), 31 if "**" in rate else 21)
    nothing(tmp_path, loop("", body.replace(rate, "0.1 * 0.9**step").replace("  # FAULT", "")))


EPOCHS = """\
EPOCHS = 12
net = nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.{kind}
for epoch in range(EPOCHS):
    for batch in range({batches}):
        loss = net(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        {inner}  # HERE
    {outer}
"""
STEP = "scheduler.step()"


@pytest.mark.parametrize(
    "kind", ["MultiStepLR(optimizer, [6, 9], 0.3)", "CosineAnnealingLR(optimizer, T_max=EPOCHS)"]
)
def test_a_schedule_as_long_as_the_loop_over_epochs(tmp_path, kind):
    parts = {"kind": kind, "batches": 5}
    look(tmp_path, EPOCHS.format(inner=STEP, outer="pass", **parts)).one(31)
    (tmp_path / "right").mkdir()  # sources are read once
    look(tmp_path / "right", EPOCHS.format(inner="pass", outer=STEP, **parts)).clean()


@pytest.mark.parametrize(
    "kind", ["CosineAnnealingLR(optimizer, T_max=5 * EPOCHS)", "CosineAnnealingLR(optimizer, 5)"]
)
def test_a_schedule_that_counts_batches(tmp_path, kind):
    look(tmp_path, EPOCHS.format(kind=kind, batches=5, inner=STEP, outer="pass")).clean()
