"""Class 19: labels at padding that real tokens have as well."""

import pytest

from doctor.snippets import nothing, only

TAGGER = """
tokens = nn.Embedding(20, 8, padding_idx=0)
rnn, head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)
adam = torch.optim.Adam([*tokens.parameters(), *rnn.parameters(), *head.parameters()])
for step in range(4):
    lengths = torch.randint(2, 8, (6, 1))
    lengths[0] = 8
    mask = torch.arange(8) < lengths
    ids = torch.randint(1, 20, (6, 8)) * mask
    tags = ids % 3
    scores = head(rnn(tokens(ids))[0])
    {loss}
    adam.zero_grad()
    loss.backward()
    adam.step()
"""
FRAMES = """
from torch.nn.utils.rnn import pad_sequence
rnn, head = nn.GRU(5, 8, batch_first=True), nn.Linear(8, 2)
adam = torch.optim.Adam([*rnn.parameters(), *head.parameters()])
for step in range(4):
    rows = [torch.randn(n, 5) for n in (3, 7, 5, 4)]
    labels = pad_sequence([(row[:, 0] > 0).long() for row in rows], {options})
    scores = head(rnn(pad_sequence(rows, batch_first=True))[0])
    loss = F.cross_entropy(scores.reshape(-1, 2), labels.view(-1))  # FAULT
    adam.zero_grad()
    loss.backward()
    adam.step()
"""


@pytest.mark.parametrize(
    "loss",
    [
        "loss = F.cross_entropy(scores.view(-1, 3), tags.view(-1))",
        "loss = F.cross_entropy(scores.transpose(1, 2), tags)",
        "loss = F.binary_cross_entropy_with_logits(scores[..., 0], (tags > 0).float())",
    ],
)
def test_labels_at_padding(tmp_path, loss):
    only(tmp_path, TAGGER.format(loss=f"{loss}  # FAULT"), 19)


@pytest.mark.parametrize(
    "loss",
    [
        "loss = F.cross_entropy(scores[mask], tags[mask])",
        "loss = F.cross_entropy(scores.transpose(1, 2), tags.masked_fill(~mask, -100))",
        "loss = F.cross_entropy(scores.view(-1, 3), tags.view(-1), reduction='none')[mask.view(-1)]"
        ".mean()",
        "loss = F.cross_entropy(scores.masked_fill(~mask[..., None], 0).transpose(1, 2), tags)",
        # a label of its own: padding may be meant to be told apart
        "loss = F.cross_entropy(scores.transpose(1, 2), (tags > 0) * mask + 1 * mask)",
    ],
)
def test_padding_that_does_not_count(tmp_path, loss):
    nothing(tmp_path, TAGGER.format(loss=loss))


def test_labels_of_pad_sequence(tmp_path):
    only(tmp_path, FRAMES.format(options="batch_first=True"), 19)
    source = FRAMES.format(options="batch_first=True, padding_value=-100")
    nothing(tmp_path, source.replace("  # FAULT", ""))
