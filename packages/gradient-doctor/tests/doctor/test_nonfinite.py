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


EXPONENTIAL = """\
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    if step == 21:
        x = x * 300
    error = F.cross_entropy(model(x), y)
    near = torch.exp(-model(x).square().sum(-1))
    loss = {loss}
    loss = loss + near.mean() + (model(x) - model(x).amax(-1, keepdim=True)).exp().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_an_exponential_that_nothing_bounds_is_what_overflowed(tmp_path):
    found = look(tmp_path, EXPONENTIAL.format(loss="torch.exp(error / 0.5)  # HERE"))
    assert "was not traced" in found.one(27).why
    look(tmp_path, EXPONENTIAL.format(loss="torch.exp(error.clamp(max=2.0))")).clean()


LABELS = """\
encoder = nn.Sequential(nn.Conv1d(6, 8, 5, stride={stride}, padding=2), nn.ReLU())
head = nn.Linear(8, 4)
criterion = nn.CTCLoss()  # HERE
optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()])
for step in range(4):
    scores = head(encoder(torch.randn(3, 6, 24)).permute(2, 0, 1)).log_softmax(-1)
    sizes = torch.tensor([3, 7, 5])
    frames = torch.full((3,), len(scores))
    labels = torch.tensor([1, 2, 3] * 5)
    loss = criterion(scores, labels, frames, sizes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_labels_that_are_longer_than_the_frames_are_the_criterions_to_allow(tmp_path):
    found = look(tmp_path, LABELS.format(stride=4))
    assert "more frames than there are" in found.one(27).why
    look(tmp_path, LABELS.format(stride=1)).clean()


MASKED = """\
model, head = nn.Linear(4, 4), nn.Linear(4, 1)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
for step in range(4):
    x = torch.randn(2, 5, 4)
    kept = torch.tensor([[1, 1, 1, 0, 0], [{first}, 0, 0, 0, 0]]).bool()
    scores = model(x) @ x.mT / 2
    scores = scores + torch.zeros(5, 5).masked_fill(torch.eye(5).bool(), {own})
    scores = scores.masked_fill(~kept[:, None], -torch.inf){here}
    scores = scores * 1.5
    loss = head(scores.softmax(-1) @ x)[:, 0].square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_line_that_masks_the_last_place_of_a_row_is_named(tmp_path):
    look(tmp_path, MASKED.format(first=0, own=0.0, here="  # HERE")).one(27)
    # each of two masks leaves something, both together do not
    look(tmp_path, MASKED.format(first=1, own="-torch.inf", here="  # HERE")).one(27)
    look(tmp_path, MASKED.format(first=1, own=0.0, here="")).clean()


SELECTED = """\
model, other = nn.Linear(4, 4), nn.Linear(4, 1)
optimizer = torch.optim.Adam([*model.parameters(), *other.parameters()])
for step in range(20):
    x, label = torch.randn(6, 4), torch.arange(6) % 2
    if step == 11:
        label = torch.ones(6)
    scale = x.square().sum(-1)
    error = (model(x) - x).square().sum(-1) / scale
    {loss}
    loss = loss + other(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_loss_that_is_a_number_again_was_the_mean_of_nothing(tmp_path):
    found = look(tmp_path, SELECTED.format(loss="loss = error[label == 0].mean()  # HERE"))
    assert "in step 11" in found.one(27).what


def test_a_count_that_a_later_batch_has_none_of(tmp_path):
    lines = """wide = F.relu(error - 1)
    count = int((wide > 0).sum())
    loss = wide.sum() / {count}"""
    body = SELECTED.replace("if step == 11:", "if step == 11: x = x * 1e-3")
    body = body.replace("        label = torch.ones(6)\n", "").replace("/ scale", "")
    found = look(tmp_path, body.format(loss=lines.format(count="count  # HERE")))
    assert "a division by zero" in found.one(27).why
    look(tmp_path, body.format(loss=lines.format(count="max(count, 1)"))).clean()


def test_an_exponential_of_complex_numbers(tmp_path):
    look(
        tmp_path,
        """
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
for step in range(3):
    loss = torch.exp(0.01 * torch.fft.fft(net(torch.randn(8, 4)))).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    ).clean()
