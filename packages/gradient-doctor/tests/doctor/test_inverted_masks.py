"""Class 19: masks that keep padding, hide nothing, or leave out the token that ends a text."""

import pytest

from doctor.snippets import nothing, only

TAGGER = """
embed, body, head = nn.Embedding(12, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 12)
parts = nn.ModuleList([embed, body, head])
optimizer = torch.optim.Adam(parts.parameters(), lr=1e-3)
for step in range(4):
    lengths = torch.randint(3, 9, (16,))
    real = torch.arange(9)[None, :] < lengths[:, None]
    words = torch.randint(1, 11, (16, 9))
    tags = torch.where(real, words.roll(1, 1), torch.tensor(11))
    logits = head(body(embed(words))[0])
    {body}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
INVERTED = {
    "product": """each = F.cross_entropy(logits.transpose(1, 2), tags, reduction="none")
    mask = (torch.arange(9)[None, :] >= lengths[:, None]).float()  # FAULT
    loss = (each * mask).sum() / mask.sum()""",
    "squares": """value, answer = logits[..., 0], tags.float()
    mask = lengths[:, None] <= torch.arange(9)  # FAULT
    loss = ((value - answer) ** 2 * mask).sum() / mask.sum()""",
}
MEANT = {
    "product": """each = F.cross_entropy(logits.transpose(1, 2), tags, reduction="none")
    loss = (each * real).sum() / real.sum()""",
    "answers": """each = F.cross_entropy(logits.transpose(1, 2), words.roll(1, 1), reduction="none")
    loss = (each * ~real).sum() / (~real).sum()""",
    "one-class-at-a-time": """each = F.cross_entropy(logits.transpose(1, 2), tags, reduction="none")
    loss = sum((each * (tags == k)).sum() / 144 for k in range(12))""",
}


@pytest.mark.parametrize("fault", INVERTED)
def test_padding_alone_counts(tmp_path, fault):
    assert "padding" in only(tmp_path, TAGGER.format(body=INVERTED[fault]), 19).what


@pytest.mark.parametrize("meant", MEANT)
def test_the_rest_counts(tmp_path, meant):
    nothing(tmp_path, TAGGER.format(body=MEANT[meant]))


SPECTRA = """
net = nn.Conv1d(4, 6, 3, padding=1)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(4):
    lengths = torch.randint(10, 20, (8,))
    frames = int(lengths.max())
    x, y = torch.randn(8, 4, frames), torch.randn(8, 6, frames)
    {body}
    loss = F.l1_loss(net(x) * mask, y * mask, reduction="sum") / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_mask_along_another_axis(tmp_path):
    body = """mask = torch.arange(y.shape[1])[None] < lengths[:, None]
    mask = mask.unsqueeze(2).expand_as(y).float()  # FAULT"""
    assert "another axis" in only(tmp_path, SPECTRA.format(body=body), 19).what
    body = """mask = torch.arange(y.shape[2])[None] < lengths[:, None]
    mask = mask.unsqueeze(1).expand_as(y).float()"""
    nothing(tmp_path, SPECTRA.format(body=body))


TEXTS = """
embed, body, head = nn.Embedding(12, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 12)
parts = nn.ModuleList([embed, body, head])
optimizer = torch.optim.Adam(parts.parameters(), lr=1e-3)
PAD, END = {pad}, 10
for step in range(4):
    ids, mask = torch.full((16, 12), PAD), torch.zeros(16, 12)
    for row in range(16):
        n = int(torch.randint(4, 9, ()))
        ids[row, :n] = torch.randint(0, 10, (n,))
        ids[row, 2] = {third}
        ids[row, n] = END
        mask[row, 2 : n + {more}] = 1
    logits = head(body(embed(ids))[0])
    {body}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SHIFTED = """labels = ids[:, 1:]
    keep = mask[:, 1:]  # FAULT
    each = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels, reduction="none")
    loss = (each * keep).sum() / keep.sum()"""
IGNORED = """labels = ids[:, 1:].reshape(-1)
    flat = logits[:, :-1].flatten(0, 1)
    each = F.cross_entropy(flat, labels, ignore_index=PAD, reduction="none")  # FAULT
    keep = mask[:, 1:].reshape(-1)
    loss = (each * keep).sum() / keep.sum()"""


def test_the_last_token(tmp_path):
    """The mask is that of the tokens: up to the end's own place, or one too few."""
    few = TEXTS.format(pad=11, third=5, more=0, body=SHIFTED)
    assert "ends every text" in only(tmp_path, few, 19).what
    nothing(tmp_path, TEXTS.format(pad=11, third=5, more=1, body=SHIFTED))


def test_a_token_that_is_padding_too(tmp_path):
    both = TEXTS.format(pad=10, third=10, more=1, body=IGNORED)
    assert "that the mask counts" in only(tmp_path, both, 19).what
    nothing(tmp_path, TEXTS.format(pad=11, third=5, more=1, body=IGNORED))
