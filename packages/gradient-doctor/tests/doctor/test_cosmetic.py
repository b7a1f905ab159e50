"""Class 23: terms that change the loss's number, and not the update."""

import pytest

from doctor.snippets import look, loop, nothing, only, serious
from gradient_doctor import Severity

START = ["f = body(x)", "main = F.cross_entropy(head(f), y)", "size = f.square().mean()"]
BODY = {"body.weight", "body.bias"}

ADDENDS = {
    "item": ["loss = main + 0.1 * size.item()  # FAULT"],
    "float": ["loss = main + float(size)  # FAULT"],
    "detach": ["loss = main - 0.1 * size.detach()  # FAULT"],
    "alpha": ["loss = torch.add(main, size.detach(), alpha=0.1)  # FAULT"],
    "in-place": ["loss = main", "loss += 0.1 * size.detach()  # FAULT"],
    "no_grad": [
        "with torch.no_grad():  # FAULT",
        "    size = f.square().mean()",
        "loss = main + size",
    ],
    "a comparison in no_grad": [
        "with torch.no_grad():  # FAULT",
        "    size = F.mse_loss(body(x), x.repeat(1, 2))",
        "loss = main + size",
    ],
    "a float": [
        "number = float(f.square().mean())  # FAULT",
        "size = 0.1 * number",
        "loss = main + size",
    ],
    "weights by .data": [
        "size = body.weight.data.square().sum()  # FAULT",
        "loss = main + 0.1 * size + 0.1 * body.bias.square().sum()",
    ],
    "argmax": [
        "picked = head(f).argmax(1)  # FAULT",
        "size = (picked - y).abs().float().mean()",
        "loss = main + 0.1 * size",
    ],
    "stacked": ["loss = torch.stack([main, 0.1 * size.detach()]).sum()  # FAULT"],
    "sum": ["loss = sum([main, 0.1 * size.detach()]) / 2  # FAULT"],
    "scaled-later": ["loss = main + 0.1 * size.detach()  # FAULT", "loss = -0.5 * -loss"],
    "maxima that are added": ["loss = (main + 0 * f + f.amax(1, True).detach()).mean()  # FAULT"],
    "per-row": [
        "rows = F.cross_entropy(head(f), y, reduction='none')",
        "rows = rows + 0.1 * f.square().mean(-1).detach()  # FAULT",
        "loss = torch.where(y > 0, rows, torch.zeros(())).sum() / 8",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ADDENDS)
def test_a_term_without_gradient(name, tmp_path):
    finding = only(tmp_path, loop(*START, *ADDENDS[name]), 23)
    assert finding.severity is Severity.WARNING
    assert set(finding.parameters) >= (BODY if name != "weights by .data" else {"body.weight"})
    assert "addition" in finding.why


def test_a_term_from_data_alone(tmp_path):
    finding = only(tmp_path, loop(*START, "loss = main + 0.1 * x.square().mean()  # FAULT"), 23)
    assert "data alone" in finding.why
    assert finding.parameters == ()


def test_a_term_that_takes_the_only_gradient_away_is_a_cut(tmp_path):
    source = loop(
        "one, two = F.cross_entropy(head(torch.ones(8, 8)), y), body(x).square().mean()",
        "loss = one + 0.1 * two.detach()  # FAULT",
    )
    finding = only(tmp_path, source, 3)
    assert set(finding.parameters) == BODY


FACTORS = {
    "data": "loss = (0.5 + 0.5 * (x > 0).float().mean()) * main  # FAULT",
    "item": "loss = main * (1 + size.item())  # FAULT",
    "detach": "loss = (0.3 + f.detach().abs().mean()) * main  # FAULT",
    "whole-sum": "loss = -(0.3 + x.abs().mean()) * -(main + 0.1 * size) / 2  # FAULT",
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_of_the_whole_loss_under_adam(name, tmp_path):
    finding = only(tmp_path, loop(*START, FACTORS[name]), 23)
    assert finding.severity is Severity.WARNING
    assert "rescales the whole loss" in finding.what
    assert "Adam" in finding.why


@pytest.mark.parametrize("name", FACTORS)
def test_under_sgd_such_a_factor_is_a_note(name, tmp_path):
    source = loop(*START, FACTORS[name]).replace("Adam([", "SGD([").replace("()])", "()], lr=0.1)")
    examination, _ = look(tmp_path, source)
    assert not serious(examination)
    assert [f.number for f in examination.findings if f.number] == [23]


CLEAN = {
    "plain": ["loss = main + 0.1 * size"],
    "constants": ["loss = 2.0 * (main + 0.1 * size) / 3 + 1.0"],
    "constant-tensors": ["loss = torch.tensor(0.7) * main + torch.tensor(0.3)"],
    "zeros": ["loss = torch.zeros(()) + main", "loss = loss / torch.tensor(2.0)"],
    "normalised": ["loss = main / size.detach()"],
    "by-a-count": ["loss = main * 8 / (y >= 0).sum()"],
    "by-a-share": ["loss = main * ((y > 0).sum() / y.numel())"],
    "reciprocal": ["loss = main * (1.0 / (y >= 0).sum())"],
    "same-value": ["loss = main - main.detach() + 0.5 * main"],
    "straight-through": ["loss = main + (main * size - main).detach()"],
    "weight-of-a-term": ["loss = main + x.abs().mean() * size"],
    "weights-of-rows": ["loss = (x[:, 0].abs() * f.square().sum(-1)).mean() + main"],
    "estimate-of-kl": [
        "with torch.no_grad():",
        "    old = head(body(x)).log_softmax(-1)",
        "new = head(f).log_softmax(-1)",
        "loss = main + 0.1 * ((old - new).exp() - (old - new) - 1).mean()",
    ],
    "teacher": [
        "with torch.no_grad():",
        "    p = teacher(x).softmax(-1)",
        "entropy = -(p * p.log()).sum(-1).mean()",
        "loss = -(p * head(f).log_softmax(-1)).sum(-1).mean() - entropy",
    ],
    "score": [
        "law = Categorical(logits=head(f))",
        "action = law.sample()",
        "loss = -law.log_prob(action).sum() * (action.float() - x[:, 0]).mean()",
    ],
    "logged": ["loss = main", "print(0.5 * loss.item() + size.item())"],
    "a log-softmax by hand": [
        "scores = head(f)",
        "scores = scores - scores.max(1, keepdim=True).values.detach()",
        "logs = scores - scores.exp().sum(1, keepdim=True).log()",
        "loss = -(logs * F.one_hot(y, 3)).sum(1).mean()",
    ],
    "a log-softmax of detached scores' maxima": [
        "scores = head(f)",
        "scores = scores - scores.detach().amax(1).unsqueeze(1)",
        "logs = scores - scores.exp().sum(1, keepdim=True).log()",
        "loss = -(logs * F.one_hot(y, 3)).sum(1).mean()",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_what_only_looks_like_it(name, tmp_path):
    nothing(tmp_path, "teacher = nn.Linear(4, 3)\n" + loop(*START, *CLEAN[name]))


def test_a_scaler_is_no_factor(tmp_path):
    source = loop(*START, "loss = main + 0.1 * size").replace(
        "    loss.backward()\n    optimizer.step()",
        "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()",
    )
    examination, _ = look(tmp_path, "scaler = torch.amp.GradScaler('cpu')\n" + source)
    assert not [f for f in examination.findings if f.number == 23]


def test_micro_batches_may_have_weights(tmp_path):
    source = """
model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    for _ in range(2):
        x = torch.randn(8, 4)
        loss = (0.2 + x.abs().mean()) * model(x).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    nothing(tmp_path, source)


SQUASHED = """
policy = nn.Linear(4, 4)
optimizer = torch.optim.Adam(policy.parameters())
for step in range(4):
    x = torch.randn(8, 4)
    mean, scale = policy(x).chunk(2, -1)
    law = Normal(mean, scale.exp())
    raw = {draw}
    logp = law.log_prob(raw) - torch.log(1 - torch.tanh(raw).square() + 1e-6){mark}
    loss = -(logp.sum(-1) * x[:, 0]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "draw",
    ["law.sample()", "law.rsample().detach()", "law.rsample().data", "law.rsample()[:].detach()"],
)
def test_the_correction_of_a_detached_draw_is_no_term(draw, tmp_path):
    nothing(tmp_path, SQUASHED.format(draw=draw, mark=""))


def test_what_is_detached_and_no_draw_is_a_term(tmp_path):
    source = SQUASHED.format(draw="mean.detach()", mark="  # FAULT")
    assert only(tmp_path, source, 23).severity is Severity.WARNING


def test_a_detached_draw_that_takes_the_only_gradient_away(tmp_path):
    source = loop("f = Normal(body(x), 0.3).rsample().detach()  # FAULT",
                  "loss = F.cross_entropy(head(f), y)")  # fmt: skip
    finding = only(tmp_path, source, 3)
    assert set(finding.parameters) == BODY
    assert "`detach`" in finding.why
    assert "rsample" not in finding.fix


def test_a_cut_elsewhere_is_the_line_to_change(tmp_path):
    source = loop(*START[:2], "kept = f.detach()  # FAULT", "loss = main + 0.1 * kept.abs().mean()")
    only(tmp_path, source, 23)


def test_the_factor_of_a_multiplier_says_which_way_it_moves(tmp_path):
    source = """
model, multiplier = nn.Linear(4, 1), nn.Parameter(torch.zeros(()))
one, two = torch.optim.Adam(model.parameters()), torch.optim.Adam([multiplier])
for step in range(4):
    x = torch.randn(8, 4)
    cost = model(x).square().mean()
    loss = F.mse_loss(model(x), x[:, :1]) + multiplier.exp().detach() * cost
    one.zero_grad()
    loss.backward()
    one.step()
    dual = -multiplier.exp() * (cost.detach() - 0.1)
    two.zero_grad()
    dual.backward()
    two.step()
"""
    nothing(tmp_path, source)


def test_a_region_that_another_term_uses_rightly_is_not_the_line_to_change(tmp_path):
    source = loop(
        "with torch.no_grad():",
        "    before = head(body(x)).log_softmax(-1)",
        "    spread = -(before.exp() * before).sum(-1).mean()",
        "main = ((head(body(x)).log_softmax(-1) - before) * x[:, :3]).mean()",
        "loss = main - 0.01 * spread  # FAULT",
    )
    only(tmp_path, source, 23)
