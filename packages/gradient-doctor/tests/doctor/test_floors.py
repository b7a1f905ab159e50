"""Class 20: a floor under a term of the loss that the term never rises above."""

import pytest

from doctor.look import look

LOOP = """\
encoder, decoder = nn.Linear(6, 4), nn.Linear(4, 6)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
for step in range(60):
    x = torch.randn(16, 6)
    z = encoder(x)
    rest = (decoder(z) - x).square().mean()
    {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_floor_above_the_scale_of_its_term(tmp_path):
    loss = """cost = z.square().mean(0) / 6
    cost = torch.clamp(cost, min=2.0)  # HERE
    loss = rest + cost.sum()"""
    assert "early and late" in look(tmp_path, LOOP.format(loss=loss)).one(20).what


MEANT = {
    "comes-free": "loss = rest + (0.05 + step / 100 * z.abs().mean(0)).clamp(min=0.1).sum()",
    "on-its-way": "loss = rest + (0.01 * z.abs().mean(0) + 0.009 * step).clamp(min=0.6).sum()",
    "penalty": "loss = rest + (z.square().mean() - 100).clamp(min=0.0)",
    "divisor": "loss = rest + (z / z.norm().clamp(min=1000.0)).mean()",
    "some": "loss = rest + torch.maximum(z.square(), torch.tensor(0.5)).mean()",
}


@pytest.mark.parametrize("loss", MEANT.values(), ids=MEANT)
def test_floors_that_are_meant(tmp_path, loss):
    look(tmp_path, LOOP.format(loss=loss)).clean()
