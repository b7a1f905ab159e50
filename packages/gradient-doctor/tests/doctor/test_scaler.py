"""Class 17: the order of the scaler's calls, each mistake and the right ways."""

import pytest

from doctor.snippets import look, nothing, only
from gradient_doctor import Severity

SETUP = """
body, head = nn.Linear(4, 8), nn.Linear(8, 3)
optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
second = torch.optim.SGD(head.parameters(), lr=0.1)
everything = [*body.parameters(), *head.parameters()]
clip = nn.utils.clip_grad_norm_
scaler = torch.amp.GradScaler("cpu", init_scale=128.0{enabled})
for step in range(4):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    with torch.autocast("cpu", torch.float16):
        features = torch.tanh(body(x))
        logits = head(features)
    loss = F.cross_entropy(logits.float(), y)
    penalty = features.float().square().mean()
    optimizer.zero_grad()
    second.zero_grad()
{step}
"""


def script(*lines, enabled=""):
    return SETUP.format(step="\n".join(f"    {line}" for line in lines), enabled=enabled)


BACKWARD = "scaler.scale(loss).backward()"
RETAINED = "scaler.scale(loss).backward(retain_graph=True)"
STEP = ("scaler.step(optimizer)", "scaler.step(second)", "scaler.update()")
UNSCALE = ("scaler.unscale_(optimizer)", "scaler.unscale_(second)")
CLIP = "clip(everything, 1.0)"

WRONG = {
    "clip-scaled": (BACKWARD, f"{CLIP}  # FAULT", *STEP),
    "clip-half-unscaled": (BACKWARD, UNSCALE[0], f"{CLIP}  # FAULT", *STEP),
    "clip-value-scaled": (BACKWARD, "nn.utils.clip_grad_value_(everything, 1.0)  # FAULT", *STEP),
    "unscaled-loss": ("loss.backward()  # FAULT", *STEP),
    "scale-thrown-away": ("scaler.scale(loss)", "loss.backward()  # FAULT", *STEP),
    "one-loss-unscaled": (
        RETAINED,
        "penalty.backward()  # FAULT",
        *STEP,
    ),
    "direct-step": (BACKWARD, STEP[0], "second.step()  # FAULT", STEP[2]),
    "direct-step-after-unscale": (BACKWARD, *UNSCALE, STEP[0], "second.step()  # FAULT", STEP[2]),
    "unscale-twice": (BACKWARD, *UNSCALE, "scaler.unscale_(optimizer)  # FAULT", *STEP),
    "unscale-after-step": (BACKWARD, *STEP[:2], "scaler.unscale_(second)  # FAULT", STEP[2]),
    "no-update": (BACKWARD, "scaler.step(optimizer)  # FAULT", STEP[1]),
    "step-twice": (BACKWARD, STEP[0], "scaler.step(optimizer)  # FAULT", *STEP[1:]),
    "update-first": (BACKWARD, "scaler.update()  # FAULT", *STEP),
    "update-between": (BACKWARD, *UNSCALE, "scaler.update()  # FAULT", *STEP),
    "step-before-backward": (
        "scaler.scale(loss)",
        "scaler.step(optimizer)  # FAULT",
        BACKWARD,
        *STEP[1:],
    ),
    "unscale-before-the-last-backward": (
        RETAINED,
        "scaler.unscale_(optimizer)  # FAULT",
        "scaler.scale(penalty).backward()",
        *STEP,
    ),
    "clip-after-step": (BACKWARD, *STEP, f"{CLIP}  # FAULT"),
}


@pytest.mark.parametrize("lines", WRONG.values(), ids=WRONG)
def test_out_of_order(tmp_path, lines):
    examination, marked = look(tmp_path, script(*lines))
    shown = "\n".join(map(str, examination.findings)) or repr(examination.error)
    found = [f for f in examination.findings if f.severity >= Severity.WARNING]
    assert {f.number for f in found} == {17}, shown
    assert {f.site.line for f in found} == set(marked), shown
    assert "The order is" in found[0].fix


RIGHT = {
    "plain": (BACKWARD, *STEP),
    "clipped": (BACKWARD, *UNSCALE, CLIP, *STEP),
    "one-clipped": (BACKWARD, UNSCALE[0], "clip(body.parameters(), 1.0)", *STEP),
    "two-losses": (RETAINED, "scaler.scale(penalty).backward()", *STEP),
    "sum-of-scaled": ("(scaler.scale(loss) + scaler.scale(penalty)).backward()", *STEP),
    "scaled-list": ("sum(scaler.scale([loss, penalty])).backward()", *STEP),
    "gradient-after-unscale": (RETAINED, *UNSCALE, "penalty.backward()", CLIP, *STEP),
    "by-keyword": (BACKWARD, "scaler.step(optimizer=optimizer)", *STEP[1:]),
    "bad-norm-skipped": (
        BACKWARD, *UNSCALE, "if step == 1:", "    scaler.update()", "    continue", *STEP,
    ),
    "norm-only": (BACKWARD, "clip(everything, float('inf'))", *STEP),
    "without-a-scaler": ("loss.backward()", CLIP, "optimizer.step()", "second.step()"),
}  # fmt: skip


@pytest.mark.parametrize("lines", RIGHT.values(), ids=RIGHT)
def test_in_order(tmp_path, lines):
    nothing(tmp_path, script(*lines))


def test_a_disabled_scaler_has_no_protocol(tmp_path):
    lines = (BACKWARD, CLIP, "optimizer.step()", "second.step()")
    nothing(tmp_path, script(*lines, enabled=", enabled=False"))


def test_the_factor_and_the_limit_are_named(tmp_path):
    finding = only(tmp_path, script(BACKWARD, f"{CLIP}  # FAULT", *STEP), 17)
    assert "128 times too large" in finding.why
    assert "acts like 0.0078" in finding.why
    assert len(finding.parameters) == 4


def test_a_refused_call_carries_the_finding(tmp_path):
    for lines in (WRONG["unscale-twice"], WRONG["unscaled-loss"]):
        examination, _ = look(tmp_path, script(*lines))
        assert any("17 scaler-protocol" in note for note in examination.error.__notes__)


def test_a_scaler_without_half_precision_is_a_note(tmp_path):
    source = script(BACKWARD, *STEP).replace("torch.float16", "torch.bfloat16")
    examination, _ = look(tmp_path, source)
    assert [(f.number, f.severity) for f in examination.findings] == [(17, Severity.NOTE)]


PLAIN = """
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
{make}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0{enabled})
for step in range(4):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    {forward}
    optimizer.zero_grad()
    scaler.scale(loss).backward(){mark}
    scaler.step(optimizer)
    scaler.update()
"""
FORWARD = "loss = F.cross_entropy(model(x).float(), y)"
AUTOCAST = "with torch.autocast('cpu', torch.{}{}): " + FORWARD


def plain(forward=FORWARD, make="", enabled="", mark=""):
    return PLAIN.format(forward=forward, make=make, enabled=enabled, mark=mark)


@pytest.mark.parametrize("forward", [FORWARD, AUTOCAST.format("float16", ", enabled=False")])
def test_a_scaler_in_float32_is_of_no_use(tmp_path, forward):
    """A note: it costs time and changes no weight."""
    examination, lines = look(tmp_path, plain(forward, mark="  # FAULT"))
    [finding] = [f for f in examination.findings if f.number == 17]
    assert finding.severity is Severity.NOTE
    assert finding.site.line in lines
    assert "Everything ran in float32" in finding.why


@pytest.mark.parametrize(
    "options",
    [
        {"forward": AUTOCAST.format("float16", "")},
        {"forward": "loss = F.cross_entropy(model(x).half().float(), y)"},
        {"make": "model = model.requires_grad_(True); h = nn.Linear(4, 4).half()",
         "forward": "loss = F.cross_entropy(model(h(x.half()).float().detach()), y)"},
        {"enabled": ", enabled=False"},
        # an autocast that happens to meet no operation that it changes
        {"make": "model = nn.Embedding(4, 3)",
         "forward": "with torch.autocast('cpu', torch.float16): loss = model(y).square().mean()"},
    ],
    ids=["autocast", "half-inside", "half-encoder", "disabled", "nothing-to-cast"],
)  # fmt: skip
def test_a_scaler_that_is_of_use(tmp_path, options):
    nothing(tmp_path, plain(**options))


def test_what_is_compiled_is_not_judged(tmp_path):
    make = "model = torch.compile(model, backend='eager')"
    forward = AUTOCAST.format("float16", "")
    nothing(tmp_path, plain(forward, make))


EARLY_CLIP = """
net = nn.LSTM(4, 8)
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(6):
    {before}
    loss = net(torch.randn(5, 3, 4))[0].square().mean()
    loss.backward()
    {after}
    sgd.step()
"""
NET_CLIP = "nn.utils.clip_grad_norm_(net.parameters(), 1.0)"


def test_clipping_before_there_are_gradients(tmp_path):
    only(tmp_path, EARLY_CLIP.format(before=f"sgd.zero_grad(); {NET_CLIP}  # FAULT", after=""), 22)
    nothing(tmp_path, EARLY_CLIP.format(before="sgd.zero_grad()", after=NET_CLIP))


def test_a_step_at_the_beginning_of_the_next_round(tmp_path):
    late = f"{NET_CLIP}; sgd.step(); sgd.zero_grad()"
    source = EARLY_CLIP.format(before=late, after="").replace("    sgd.step()\n", "")
    nothing(tmp_path, source)


BY_HAND = (
    BACKWARD,
    "{unscale}",
    "size = float(sum(p.grad.square().sum() for p in everything)) ** 0.5",
    "for p in everything: p.grad.mul_(0.01 / size){fault}",
    *STEP,
)


def test_a_clip_by_hand_of_scaled_gradients(tmp_path):
    lines = [line.format(unscale="pass", fault="  # FAULT") for line in BY_HAND]
    assert only(tmp_path, script(*lines), 17)
    lines = [line.format(unscale="; ".join(UNSCALE), fault="") for line in BY_HAND]
    nothing(tmp_path, script(*lines))
