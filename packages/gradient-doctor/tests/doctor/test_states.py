"""Class 3: a recurrent state that is detached at each step of one loss."""

import pytest

from doctor.snippets import nothing, only

SCRIPT = """
cell, readout = nn.{cell}(4, 8), nn.Linear(8, 4)
optimizer = torch.optim.Adam([*cell.parameters(), *readout.parameters()])
for step in range(4):
    x, h, c, y, loss = torch.randn(5, 9, 4), torch.zeros(5, 8), torch.zeros(5, 8), x0, 0
    for t in range(8):
{body}
        loss = loss + F.mse_loss({prediction}, x[:, t + 1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def script(*body: str, cell: str = "GRUCell", prediction: str = "readout(h)") -> str:
    lines = "\n".join(f"        {line}" for line in body)
    text = SCRIPT.format(cell=cell, body=lines, prediction=prediction)
    return "x0 = torch.zeros(5, 4)\n" + text


FAULTS = {
    "gru": script("h = cell(x[:, t], h.detach())  # FAULT"),
    "data": script("h = cell(x[:, t], h)", "h0, h = h, h.data  # FAULT", prediction="readout(h0)"),
    "lstm": script(
        "h, c = h.detach(), c.detach()  # FAULT", "h, c = cell(x[:, t], (h, c))", cell="LSTMCell"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_state_that_is_detached_at_each_step(name, tmp_path):
    finding = only(tmp_path, FAULTS[name], 3)
    assert "longer than one step" in finding.why


CLEAN = {
    "window": script("h = h.detach() if t % 4 == 0 else h", "h = cell(x[:, t], h)"),
    "one-state-of-two": script("h, c = cell(x[:, t], (h.detach(), c))", cell="LSTMCell"),
    "feedback": script(
        "h = cell(x[:, t] + y.detach(), h)", "y = readout(h)", prediction="y"
    ),
    "prediction-as-state": script(
        "y = readout(cell(x[:, t] + y.detach(), h))", prediction="y"
    ),
    "refined": script(
        "y = y.detach()", "h = cell(y, h)", "y = y + readout(h)", prediction="y"
    ),
    "logged": script("h = cell(x[:, t], h)", "size = h.detach().norm()"),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_what_looks_like_it(name, tmp_path):
    nothing(tmp_path, CLEAN[name])


def test_truncated_between_losses(tmp_path):
    source = """
cell, readout = nn.GRUCell(4, 8), nn.Linear(8, 4)
optimizer = torch.optim.Adam([*cell.parameters(), *readout.parameters()])
h = torch.zeros(5, 8)
for step in range(6):
    x = torch.randn(5, 4)
    h = cell(x, h.detach())
    loss = F.mse_loss(readout(h), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    nothing(tmp_path, source)
