"""Class 18: labels of a language model that are shifted twice, or not at all."""

import pytest
import torch

from doctor.snippets import nothing, only
from gradient_doctor.detectors.shifts import shift_of

MODEL = """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.body = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 30)

    def forward(self, ids):
        return self.head(self.body(self.embed(ids))[0])

model = LM()
start = nn.Parameter(torch.randn(1, 1, 16))
optimizer = torch.optim.Adam([*model.parameters(), start], lr=1e-2)
for step in range(4):
    tokens = torch.randint(30, (8, 12))
{body}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def script(body):
    return MODEL.format(body="\n".join(f"    {line}" for line in body.strip().splitlines()))


TWICE = {
    "by-the-data": """
ids, labels = tokens[:, :-1], tokens[:, 1:]
loss = F.cross_entropy(model(ids)[:, :-1].transpose(1, 2), labels[:, 1:])  # FAULT
""",
    "by-the-collator": """
labels = torch.cat([tokens[:, 1:], torch.full((8, 1), -100)], dim=1)
loss = F.cross_entropy(model(tokens)[:, :-1].reshape(-1, 30), labels[:, 1:].reshape(-1))  # FAULT
""",
}
ONCE = {
    "shifted-once": """
loss = F.cross_entropy(model(tokens)[:, :-1].reshape(-1, 30), tokens[:, 1:].reshape(-1))
loss = loss + start.square().sum()
""",
    "one-and-two-ahead": """
logits = model(tokens)
loss = F.cross_entropy(logits[:, :-1].reshape(-1, 30), tokens[:, 1:].reshape(-1))
loss = loss + F.cross_entropy(logits[:, :-2].reshape(-1, 30), tokens[:, 2:].reshape(-1))
loss = loss + start.square().sum()
""",
    "shifted-as-embeddings": """
inputs = torch.cat([start.expand(8, 1, 16), model.embed(tokens)[:, :-1]], dim=1)
loss = F.cross_entropy(model.head(model.body(inputs)[0]).reshape(-1, 30), tokens.reshape(-1))
""",
    "after-a-prefix": """
inputs = torch.cat([start.expand(8, 3, 16), model.embed(tokens)], dim=1)
logits = model.head(model.body(inputs)[0])[:, 2:-1]
loss = F.cross_entropy(logits.reshape(-1, 30), tokens.reshape(-1))
""",
    "other-labels": """
loss = F.cross_entropy(model(tokens).reshape(-1, 30), (tokens % 3).reshape(-1))
loss = loss + start.square().sum()
""",
}


@pytest.mark.parametrize("fault", TWICE)
def test_a_second_shift(tmp_path, fault):
    body = TWICE[fault] + "loss = loss + start.square().sum()\n"
    assert "t + 2" in only(tmp_path, script(body), 18).what


def test_no_shift_at_all(tmp_path):
    body = """
loss = F.cross_entropy(model(tokens).reshape(-1, 30), tokens.reshape(-1))  # FAULT
loss = loss + start.square().sum()
"""
    assert "just read" in only(tmp_path, script(body), 18).what


@pytest.mark.parametrize("clean", ONCE)
def test_targets_that_fit(tmp_path, clean):
    nothing(tmp_path, script(ONCE[clean]))


def test_a_model_that_looks_ahead_may_copy(tmp_path):
    both = MODEL.replace("batch_first=True)", "batch_first=True, bidirectional=True)")
    both = both.replace("nn.Linear(16, 30)", "nn.Linear(32, 30)")
    body = "    loss = F.cross_entropy(model(tokens).transpose(1, 2), tokens)"
    nothing(tmp_path, both.format(body=body + " + start.square().sum()"))


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_the_shift_is_read_from_the_numbers(shift):
    ids = torch.arange(36).reshape(3, 12) % 11
    target = torch.full((3, 12 - shift), -100)
    target[:, 1:] = ids[:, shift + 1 :]
    assert shift_of(ids, target, -100) == shift


def test_numbers_that_repeat_say_nothing():
    ids = torch.tensor([[1, 2, 3, 4] * 3] * 3)
    assert shift_of(ids, ids.roll(-2, 1)[:, :10], -100) == 2
    assert shift_of(ids[:, :1].expand(3, 12), ids[:, :1].expand(3, 11), -100) is None
    assert shift_of(ids, torch.zeros(3, 11, dtype=torch.long), -100) is None
