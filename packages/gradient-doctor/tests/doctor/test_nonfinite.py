"""Class 27: the line that made the first number that is none."""

import pytest

from doctor.look import look, names

LOOP = """\
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{scaler}
for step in range(4):
    x = torch.randn(6, 4)
    real = torch.arange(6) < 4
    x = torch.where(real[:, None], x, torch.zeros(()))
{body}
    optimizer.zero_grad()
    {step}
"""
PLAIN = "loss.backward(); optimizer.step()"


def loop(tmp_path, *lines, scaler="", step=PLAIN):
    body = "\n".join("    " + line for line in lines)
    return look(tmp_path, LOOP.format(body=body, scaler=scaler, step=step))


FAULTS = {
    "zero-rows": (
        "h = x / x.norm(dim=-1, keepdim=True)  # HERE",
        "loss = torch.where(real, model(h).sum(-1), torch.zeros(())).mean()",
    ),
    "root-of-zero": (
        "d = model(x) - model(x).detach()",
        "loss = d.square().sum(-1).sqrt().mean()  # HERE",
    ),
    "log-of-zero": (
        "p = model(x) - model(x).detach()",
        "loss = p.log().mean()  # HERE",
    ),
    "entropy-of-a-mask": (
        "p = model(x).masked_fill(torch.tensor([True, False, False]), -torch.inf).softmax(-1)",
        "loss = -(p * p.log()).sum(-1).mean()  # HERE",
    ),
    "std-of-one": (
        "v = model(x)[:, :1]",
        "loss = (v / v.std(-1, keepdim=True)).mean()  # HERE",
    ),
    "overflow": ("loss = (model(x) * 1e4).exp().sum(-1).log().mean()  # HERE",),
}


@pytest.mark.parametrize("lines", FAULTS.values(), ids=FAULTS)
def test_the_first_bad_number_is_found(tmp_path, lines):
    found = loop(tmp_path, *lines)
    ours = [f for f in found.of(27) if f.severity == 3]
    assert [f.site.line for f in ours] == [found.line], "\n".join(map(str, found.findings))
    assert "0.weight" in names(ours[0])


CLEAN = {
    "safe-norm": (
        "h = x / (x.norm(dim=-1, keepdim=True) + 1e-6)",
        "loss = torch.where(real, model(h).sum(-1), torch.zeros(())).mean()",
    ),
    "masked-logits": (
        "p = model(x).masked_fill(torch.tensor([True, False, False]), -torch.inf).log_softmax(-1)",
        "loss = -p[:, 1].mean()",
    ),
    "unused-nan": ("rate = torch.zeros(()) / 0", "loss = model(x).square().mean()"),
}


@pytest.mark.parametrize("lines", CLEAN.values(), ids=CLEAN)
def test_infinities_that_do_no_harm(tmp_path, lines):
    loop(tmp_path, *lines).clean()


def test_steps_that_the_user_skips_are_a_warning(tmp_path):
    finite = "all(p.grad.isfinite().all() for p in model.parameters())"
    guarded = f"loss.backward()\n    if {finite}: optimizer.step()"
    found = loop(tmp_path, *FAULTS["zero-rows"], step=guarded)
    assert [f.severity for f in found.of(27)] == [2]


SCALER = "scaler = torch.amp.GradScaler('cpu', init_scale={})"
SCALED = (
    "scaler.scale(loss).backward(); scaler.unscale_(optimizer); "
    "scaler.step(optimizer); scaler.update()"
)


def test_a_scaler_that_looks_for_its_scale_is_no_fault(tmp_path):
    # the first scales overflow fp16, the later ones do not
    lines = ("loss = model(x).half().float().square().mean()",)
    found = loop(tmp_path, *lines, scaler=SCALER.format("2.0**18"), step=SCALED)
    assert not found.of(27)
    always = loop(tmp_path, *FAULTS["zero-rows"], scaler=SCALER.format("8.0"), step=SCALED)
    assert [f.site.line for f in always.of(27)] == [always.line]


def test_a_loss_that_is_no_number_with_a_gradient_that_is(tmp_path):
    found = loop(tmp_path, "loss = (model(x) - 10).log().mean()  # HERE")
    finding = found.one(27)
    assert finding.what.startswith("The loss is NaN in")
    assert "of values between -1" in finding.why


def test_a_loss_that_is_a_number(tmp_path):
    loop(tmp_path, "loss = (model(x).square() + 1).log().mean()").clean()


DIVERGES = """\
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr={rate})  # HERE
x = torch.randn(64, 4)
for step in range(30):
    loss = F.mse_loss(model(x), x.sum(-1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_loss_that_overflows_between_two_looks(tmp_path):
    finding = look(tmp_path, DIVERGES.format(rate=100.0)).one(27)
    assert "learning rate is too large" in finding.why
    look(tmp_path, DIVERGES.format(rate=0.1)).clean()


SILENT = """\
model = nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
for step in range(20):
    x = torch.rand(6, 4)
    m = torch.ones(6, 4)
    if step == 11:
        x[2], m[2] = 0.0, 0.0
    out = model(x) * x
    {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LATER = {
    "slope": (
        "size = torch.sqrt(out.square().sum(-1))  # HERE\n"
        "    loss = (size / (size.detach() + 1)).log1p().mean() / (m.sum() + 1)"
    ),
    "value": (
        "rows = torch.sqrt((out * m).square().sum(-1) + 1e-6)\n"
        "    loss = (rows / m.sum(-1)).mean()  # HERE"
    ),
}


@pytest.mark.parametrize("loss", LATER.values(), ids=LATER)
def test_a_singular_point_that_only_a_later_batch_meets(tmp_path, loss):
    assert "not traced" in look(tmp_path, SILENT.format(loss=loss)).one(27).why


def test_a_guard_keeps_later_batches_off_the_point(tmp_path):
    loss = "loss = torch.sqrt(out.square().sum(-1) + 1e-8).mean() / m.sum(-1).clamp(min=1).mean()"
    look(tmp_path, SILENT.format(loss=loss)).clean()


def test_the_logarithm_is_named_and_not_the_product_behind_it(tmp_path):
    lines = (
        "p = model(x).softmax(-1) * (x[:, :3] > 0)",
        "l = p.log()  # HERE",
        "loss = (p * l).sum()",
    )
    loop(tmp_path, *lines).one(27)
