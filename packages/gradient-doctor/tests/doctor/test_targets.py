"""Class 18: targets of a wrong shape or kind."""

import pytest

from doctor import snippets
from doctor.look import look

LOOP = """\
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, {out}))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(6, 4)
    {target}
    optimizer.zero_grad()
    {loss}
    loss.backward()
    optimizer.step()
"""


def loop(tmp_path, loss, target="y = x.sum(-1).sin()", out=1, **options):
    return look(tmp_path, LOOP.format(loss=loss, target=target, out=out), **options)


BROADCASTS = {
    "mse": "loss = F.mse_loss(model(x), y)  # HERE",
    "smooth-l1": "loss = F.smooth_l1_loss(model(x), y)  # HERE",
    "module": "loss = nn.MSELoss()(model(x), y)  # HERE",
    "minus": "loss = (model(x) - y).square().mean()  # HERE",
    "minus-other-way": "loss = (y - model(x)).abs().sum()  # HERE",
    "explicit-axis": "loss = (model(x).squeeze(-1)[:, None] * y).mean()  # HERE",
}


@pytest.mark.parametrize("loss", BROADCASTS.values(), ids=BROADCASTS)
def test_a_column_of_predictions_meets_a_row_of_targets(tmp_path, loss):
    finding = loop(tmp_path, loss).one(18)
    assert "[6, 1]" in finding.what
    assert "[6, 6]" in finding.what
    assert len(finding.parameters) == 4


CLEAN = {
    "same-shape": "loss = F.mse_loss(model(x).squeeze(-1), y)",
    "scalar-target": "loss = F.mse_loss(model(x).squeeze(-1), torch.zeros(()))",
    "pairs-on-purpose": "v = model(x).squeeze(-1); loss = (v[:, None] - v[None, :]).abs().mean()",
    "pairs-then-kernel": "loss = (model(x)[:, 0][:, None] - y).exp().sum(1).log().mean()",
    "per-column": "loss = (model(x) - x.mean(0)).square().mean()",
    "column-of-targets": "loss = F.mse_loss(model(x), y[:, None])",
}


@pytest.mark.parametrize("loss", CLEAN.values(), ids=CLEAN)
def test_shapes_that_are_meant(tmp_path, loss):
    loop(tmp_path, loss).clean()


def test_a_target_per_row_is_taken_for_one_per_column(tmp_path):
    found = loop(tmp_path, "loss = F.mse_loss(model(x), y)  # HERE", out=6)
    assert "happen to be equal" in found.one(18).why


KINDS = {
    "float-ids-as-distribution": (
        "loss = F.cross_entropy(model(x).flatten(), y)  # HERE",
        "y = torch.arange(6).float()",
        1,
    ),
    "kl-of-ids": (
        "loss = F.kl_div(F.log_softmax(model(x), -1), y, reduction='batchmean')  # HERE",
        "y = torch.randint(0, 5, (6, 6)).float() + 2",
        6,
    ),
    "kl-of-log-target": (
        "loss = F.kl_div(F.log_softmax(model(x), -1), y, log_target=False)  # HERE",
        "y = torch.randn(6, 3).log_softmax(-1)",
        3,
    ),
    "kl-of-probabilities": (
        "loss = F.kl_div(model(x).softmax(-1), y, reduction='batchmean')  # HERE",
        "y = torch.randn(6, 3).softmax(-1)",
        3,
    ),
    "bce-of-plus-minus-one": (
        "loss = F.binary_cross_entropy_with_logits(model(x)[:, 0], y)  # HERE",
        "y = x[:, 0].sign()",
        1,
    ),
    "nll-of-probabilities": (
        "loss = F.nll_loss(model(x).softmax(-1), y)  # HERE",
        "y = torch.randint(0, 3, (6,))",
        3,
    ),
}


@pytest.mark.parametrize(("loss", "target", "out"), KINDS.values(), ids=KINDS)
def test_values_that_are_no_target(tmp_path, loss, target, out):
    found = loop(tmp_path, loss, target, out)
    assert any(f.number == 18 and f.site.line == found.line for f in found.findings)


RIGHT_KINDS = {
    "ids": ("loss = F.cross_entropy(model(x), y)", "y = torch.randint(0, 3, (6,))", 3),
    "soft": ("loss = F.cross_entropy(model(x), y)", "y = torch.randn(6, 3).softmax(-1)", 3),
    "kl": (
        "loss = F.kl_div(F.log_softmax(model(x), -1), y, reduction='batchmean')",
        "y = torch.randn(6, 3).softmax(-1)",
        3,
    ),
    "kl-log": (
        "loss = F.kl_div(F.log_softmax(model(x), -1), y, reduction='sum', log_target=True)",
        "y = torch.randn(6, 3).log_softmax(-1)",
        3,
    ),
    "bce": (
        "loss = F.binary_cross_entropy_with_logits(model(x)[:, 0], y)",
        "y = (x[:, 0] > 0).float()",
        1,
    ),
}


@pytest.mark.parametrize(("loss", "target", "out"), RIGHT_KINDS.values(), ids=RIGHT_KINDS)
def test_values_that_are_a_target(tmp_path, loss, target, out):
    loop(tmp_path, loss, target, out).clean()


CRASHES = {
    "float-ids": (
        "loss = F.cross_entropy(model(x), y)",
        "y = torch.ones(6)  # HERE",
        3,
        "integers",
    ),
    "id-too-large": (
        "loss = F.cross_entropy(model(x), y)  # HERE",
        "y = torch.full((6,), 3)",
        3,
        "3 classes",
    ),
    "bce-shapes": (
        "loss = F.binary_cross_entropy_with_logits(model(x), y)  # HERE",
        "y = torch.ones(6)",
        1,
        "[6, 1]",
    ),
}


@pytest.mark.parametrize(("loss", "target", "out", "said"), CRASHES.values(), ids=CRASHES)
def test_crashes_are_translated(tmp_path, loss, target, out, said):
    found = loop(tmp_path, loss, target, out)
    assert said in found.one(18).what
    assert any("gradient_doctor: ERROR [18" in note for note in found.error.__notes__)


SEQUENCE = """\
head = nn.Linear(4, {classes})
optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
for _ in range(2):
    logits = head(torch.randn(2, 5, 4))
    target = torch.randint(0, {classes}, (2, 5))
    loss = F.cross_entropy({logits}, target)  # HERE
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_classes_on_the_last_axis_are_told_even_where_the_sizes_agree(tmp_path):
    agree = look(tmp_path, SEQUENCE.format(classes=5, logits="logits"))
    assert "both axes have size 5" in agree.one(18).why
    differ = look(tmp_path, SEQUENCE.format(classes=7, logits="logits"))
    assert "last axis" in differ.one(18).what
    look(tmp_path, SEQUENCE.format(classes=5, logits="logits.transpose(1, 2)")).clean()


# one element in the place of a batch


def test_a_target_of_one_element(tmp_path):
    snippets.only(
        tmp_path,
        snippets.loop("loss = F.mse_loss(head(body(x))[:, 0], y.float().std())  # FAULT"),
        18,
    )


def test_a_prediction_of_one_element(tmp_path):
    snippets.only(
        tmp_path, snippets.loop("loss = F.mse_loss(head(body(x)).mean(), y.float())  # FAULT"), 18
    )


@pytest.mark.parametrize(
    "line",
    [
        "loss = F.mse_loss(head(body(x))[:, 0], torch.tensor(1.0))",
        "loss = F.mse_loss(head(body(x)).mean(), y.float().mean())",
        "loss = F.mse_loss(head(body(x[:1]))[:, :1], y[:1].float().view(1, 1))",
    ],
)
def test_a_label_for_all(tmp_path, line):
    snippets.nothing(tmp_path, snippets.loop(line))


def test_raw_scores_where_probabilities_are_expected(tmp_path):
    line = "loss = F.binary_cross_entropy(9 * head(body(x))[:, 0], (y > 0).float())  # FAULT"
    examination, lines = snippets.look(tmp_path, snippets.loop(line))
    (finding,) = snippets.serious(examination)
    assert (finding.number, finding.site.line) == (18, lines[0])
    assert "with_logits" in finding.fix


def test_the_line_that_made_all_pairs_of_a_target(tmp_path):
    target = "y = x.sum(-1, keepdim=True) + x.mean(-1)  # HERE"
    assert "[6, 6]" in loop(tmp_path, "loss = F.mse_loss(model(x), y)", target).one(18).what


def test_a_column_minus_itself_as_a_row_is_meant(tmp_path):
    loop(tmp_path, "v = model(x); loss = (v - v.squeeze(1) - y).square().mean()").clean()


def test_class_ids_as_the_target_of_all_outputs(tmp_path):
    target = "y = (torch.arange(6) % 3).float()[:, None]"
    loop(tmp_path, "loss = F.mse_loss(model(x), y)  # HERE", target, out=3).one(18)
    # an ensemble: each output has the row's one answer
    loop(tmp_path, "loss = F.mse_loss(model(x), y / 2)", target, out=3).clean()


def test_labels_of_0_where_minus_1_is_meant(tmp_path):
    target = "y = (torch.arange(6) % 2).float()"
    ranking = "F.margin_ranking_loss(model(x)[:, 0], x[:, 0], {})"
    loop(tmp_path, f"loss = {ranking.format('y')}  # HERE", target).one(18)
    loop(tmp_path, f"loss = {ranking.format('2 * y - 1')}", target).clean()
