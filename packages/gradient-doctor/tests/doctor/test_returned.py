"""Numbers that leave torch and come back in a tensor that nobody sees made."""

import numpy as np
import pytest
import torch

from doctor.snippets import loop, nothing, only
from gradient_doctor.constructors import Returned, is_round
from gradient_doctor.taint import NO_CUTS, Taint

PARTS = ["parts = [f.square().mean(), f.abs().mean()]"]

TAIL = " + head.weight.square().sum() + head.bias.square().sum()"
COPIES = {
    "Tensor": [*PARTS, "loss = (torch.Tensor(parts) * head.bias[:2]).sum()  # FAULT"],
    "FloatTensor": [
        *PARTS,
        "both = torch.FloatTensor(parts)  # FAULT",
        "loss = (both * head.bias[:2]).sum()",
    ],
    "array": [
        *PARTS,
        "both = torch.from_numpy(np.array([p.item() for p in parts]))  # FAULT",
        "loss = (both.float() * head.bias[:2]).sum()",
    ],
    "rows": [
        "rows = f.detach().numpy()[[1, 4, 6]]  # FAULT",
        "loss = F.cross_entropy(head(torch.from_numpy(rows)), y[[1, 4, 6]])",
    ],
    "joined": [
        "rows = np.concatenate([f.data.numpy()[2:], f.data.numpy()[:2]])  # FAULT",
        "loss = F.cross_entropy(head(torch.tensor(rows)), y)",
    ],
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_numbers_is_a_cut(name, tmp_path):
    finding = only(
        tmp_path,
        "import numpy as np\n" + loop("f = body(x)", *COPIES[name], f"loss = loss{TAIL}"),
        3,
    )
    assert set(finding.parameters) == {"body.weight", "body.bias"}


def test_a_loss_that_came_through_numpy_is_a_cut_and_no_constant(tmp_path):
    source = "import numpy as np\n" + loop(
        "f = head(body(x))",
        "hard = f.data.numpy()[[0, 3, 5]]  # FAULT",
        "loss = (torch.from_numpy(hard) - 0.3).clamp(min=0).mean()",
    )
    only(tmp_path, source, 3)


def test_a_term_of_copied_losses(tmp_path):
    lines = [
        "main = F.cross_entropy(head(f), y)",
        "loss = main + torch.Tensor(parts).sum()  # FAULT",
    ]
    only(tmp_path, loop("f = body(x)", *PARTS, *lines), 3)


CLEAN = {
    "data": "loss = F.cross_entropy(head(f), y, weight=torch.Tensor([0.5, 2.0, 1.25]))",
    "curve": "curve = torch.Tensor([p.item() for p in parts]); loss = F.cross_entropy(head(f), y)",
    "features": "t = torch.from_numpy(np.random.rand(8, 8)).float(); loss = F.mse_loss(f, t)"
    " + F.cross_entropy(head(f), y)",
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_data_that_numpy_made_is_data(name, tmp_path):
    nothing(tmp_path, "import numpy as np\n" + loop("f = body(x)", *PARTS, CLEAN[name]))


def test_round_numbers_are_no_evidence():
    assert all(map(is_round, (0.0, 1.0, 0.5, 1e-3, -25.0, 0.125, 3e5)))
    assert not any(map(is_round, (0.123456, 3.14159, 1e-3 + 1e-8)))
    taint = Taint(1, 0, NO_CUTS, None, "item", 0)
    numbers = Returned()
    for value in (0.5, 2.0, 0.7312345):
        numbers.keep(value, taint)
    assert numbers.inside(torch.tensor([0.5, 2.0])) == []
    assert numbers.inside(torch.tensor([0.5, 0.7312345])) == [taint]
    assert numbers.inside(torch.tensor([0.7312345, 0.1234567])) == []
    arrays = Returned()
    arrays.keep_array(torch.from_numpy(np.linspace(0, 1, 97, dtype=np.float32)), taint)
    assert arrays.inside(torch.from_numpy(np.linspace(0, 1, 97, dtype=np.float32)[::3].copy()))
    assert not arrays.inside(torch.linspace(0, 1, 96))
