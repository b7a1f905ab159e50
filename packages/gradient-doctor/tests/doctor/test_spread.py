"""Losses that are one number already, times weights or a mask of single samples."""

import pytest

from doctor.look import look

LOOP = """\
model = nn.Linear(4, 6)
model.temperature = nn.Parameter(torch.ones(8))
optimizer = torch.optim.Adam(model.parameters())
criterion = nn.SmoothL1Loss({options}){here}
for step in range(4):
    x, y = torch.randn(8, 4), torch.randn(8, 6)
    weight, mask = torch.rand(8), (torch.arange(8) < 5).float()
    out = model(x) * model.temperature[:, None]
{loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def loop(tmp_path, *lines, options="", here=""):
    loss = "\n".join("    " + line for line in lines)
    return look(tmp_path, LOOP.format(loss=loss, options=options, here=here))


def test_a_sum_over_the_batch_is_counted_once_for_each_sample(tmp_path):
    lines = (
        "total = 0.5 * torch.sum((out - y) ** 2)  # HERE",
        "loss = (total * mask).sum() / mask.sum()",
    )
    finding = loop(tmp_path, *lines).one(22)
    assert "8 times" in finding.why


def test_a_mean_is_masked_in_vain(tmp_path):
    loop(tmp_path, "loss = (F.mse_loss(out, y) * mask).mean()  # HERE").one(19)


def test_weights_of_samples_meet_one_number(tmp_path):
    lines = ("error = criterion(out, y)", "loss = (weight * error).mean()")
    loop(tmp_path, *lines, here="  # HERE").one(23)


MEANT = {
    "each": "loss = (criterion(out, y).mean(-1) * weight).mean()",
    "one-factor": "loss = (out - y).square().sum() * torch.tensor(0.01)",
    "equal": "loss = ((out - y).square().mean() * torch.full((8,), 0.5)).mean()",
    "another-shape": "loss = ((out - y).square().mean() * torch.tensor([0.1, 0.2])).sum()",
    "learnt": "loss = ((out - y).square().mean() * model.temperature).mean()",
    "rows": "loss = ((out - y).square().sum(-1) * mask).sum() / mask.sum()",
}


@pytest.mark.parametrize("line", MEANT.values(), ids=MEANT)
def test_factors_that_do_what_they_say(tmp_path, line):
    loop(tmp_path, line, options="reduction='none'").clean()
