"""Class 18: what fails as an index was made as floating-point numbers somewhere else."""

import pytest

from doctor.snippets import loop, nothing, only

MADE = "ids = torch.zeros(8)  # FAULT"
FAULTS = {
    "rows": [MADE, "loss = -head(body(x)).log_softmax(1)[torch.arange(8), ids].mean()"],
    "one-by-one": [
        MADE,
        "marks = torch.zeros(8, 3)",
        "for row, k in enumerate(ids):",
        "    marks[row, k] = 1",
        "loss = F.mse_loss(head(body(x)), marks)",
    ],
    "one_hot": [MADE, "loss = F.mse_loss(head(body(x)), F.one_hot(ids.clone(), 3).float())"],
    "gather": [MADE, "loss = head(body(x)).gather(1, ids.unsqueeze(1)).mean()"],
    "embedding": [MADE, "loss = F.embedding(ids.view(8, 1), head.weight.t()).mean()"],
    "counted": [
        "ids = y.float()  # FAULT",
        "loss = F.cross_entropy(head(body(x)), y, weight=1 / torch.bincount(ids))",
    ],
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_line_that_made_floats(name, tmp_path):
    only(tmp_path, loop(*FAULTS[name]), 18)


def test_whole_numbers_and_masks_are_indices(tmp_path):
    source = loop(
        "keep = (torch.arange(8) < 6).to(torch.uint8)",
        "scores = head(body(x)).log_softmax(1)",
        "loss = -scores[torch.arange(8), torch.zeros(8).long()].mean() - scores[keep > 0].mean()",
    )
    nothing(tmp_path, source)
