"""Class 16: data and weights of two floating dtypes."""

import pytest

from doctor.look import look

SCRIPT = """\
import numpy as np

{data}
net = nn.Linear(6, 2)
{model}
optimizer = torch.optim.Adam(net.parameters())
for _ in range(3):
    loss = net({use}).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
NUMPY = "x = torch.from_numpy(np.ones((4, 6)))  # HERE"


@pytest.mark.parametrize(
    "parts",
    [
        {"data": NUMPY},
        {"data": NUMPY.replace("from_numpy", "tensor"), "use": "2 * x[:, :6]"},
        {"data": "x = torch.ones(4, 6)", "model": "net.double()  # HERE"},
    ],
    ids=["an array", "a copy of one", "the model"],
)
def test_the_line_that_gave_the_type(tmp_path, parts):
    body = SCRIPT.format(**{"data": "", "model": "", "use": "x", **parts})
    assert look(tmp_path, body).one(16).number == 16


def test_converted_in_time(tmp_path):
    look(tmp_path, SCRIPT.format(data=NUMPY, model="", use="x.float()")).clean()
    look(tmp_path, SCRIPT.format(data=NUMPY, model="net.double()", use="x")).clean()


def test_recurrent_layers_refuse_by_themselves(tmp_path):
    look(
        tmp_path,
        """\
        import numpy as np
        x = torch.tensor(np.ones((2, 3, 4)))  # HERE
        net = nn.GRU(4, 5, batch_first=True)
        optimizer = torch.optim.Adam(net.parameters())
        net(x)[0].square().mean().backward()
        """,
    ).one(16)
