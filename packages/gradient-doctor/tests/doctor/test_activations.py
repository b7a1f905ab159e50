"""Class 29: probabilities in the place of raw scores, and code that only looks like it."""

import pytest

from doctor.snippets import look, loop, nothing, only

FAULTS = {
    "softmax-into-cross-entropy": (
        "p = head(torch.tanh(body(x))).softmax(-1)  # FAULT",
        "loss = F.cross_entropy(p, y)",
    ),
    "through-shapes": (
        "p = torch.softmax(head(body(x)).view(2, 4, 3), dim=-1)  # FAULT",
        "loss = F.cross_entropy(p.reshape(-1, 3).float(), y)",
    ),
    "log-softmax-of-softmax": (
        "p = F.softmax(head(body(x)), dim=1)  # FAULT",
        "loss = F.nll_loss(F.log_softmax(p, dim=1), y)",
    ),
    "sigmoid-into-bce-with-logits": (
        "p = torch.sigmoid(head(body(x))[:, 0])  # FAULT",
        "loss = F.binary_cross_entropy_with_logits(p, (y > 0).float())",
    ),
    "sigmoid-into-cross-entropy": (
        "p = head(body(x)).sigmoid()  # FAULT",
        "loss = F.cross_entropy(p, y)",
    ),
    "logits-of-a-policy": (
        "p = head(body(x)).softmax(-1)  # FAULT",
        "loss = -(Categorical(logits=p).log_prob(y) * torch.randn(8)).mean()",
    ),
    "softmax-written-out": (
        "e = (head(body(x)) - 1.0).exp()",
        "p = e / e.sum(1, keepdim=True)  # FAULT",
        "loss = F.cross_entropy(p, y)",
    ),
    "sigmoid-written-out": (
        "p = 1 / (1 + torch.exp(-head(body(x))[:, 0]))  # FAULT",
        "loss = F.binary_cross_entropy_with_logits(p, (y > 0).float())",
    ),
    "sigmoid-by-tanh": (
        "p = (torch.tanh(head(body(x))[:, 0]) + 1) / 2  # FAULT",
        "loss = F.binary_cross_entropy_with_logits(p, (y > 0).float())",
    ),
    "sample-by-sample": (
        "p = head(body(x)).softmax(-1)  # FAULT",
        "loss = sum(F.cross_entropy(a[None], b[None]) for a, b in zip(p, y)) / len(y)",
    ),
}
CLEAN = {
    "a-softmax-of-other-sums": (
        "e = head(body(x)).exp()",
        "loss = F.cross_entropy(e / e.sum(), y)",
    ),
    "probabilities-for-a-metric": (
        "scores = head(body(x))",
        "accuracy = (scores.softmax(-1).argmax(-1) == y).float().mean()",
        "loss = F.cross_entropy(scores, y)",
    ),
    "log-of-probabilities": ("loss = F.nll_loss(head(body(x)).softmax(-1).log(), y)",),
    "probabilities-of-a-policy": (
        "p = head(body(x)).softmax(-1)",
        "loss = -(Categorical(probs=p).log_prob(y) * torch.randn(8)).mean()",
    ),
    "log-softmax-twice-is-once": ("loss = F.cross_entropy(head(body(x)).log_softmax(-1), y)",),
    "attention": (
        "h = body(x)",
        "loss = F.cross_entropy(head((h @ h.T).softmax(-1) @ h), y)",
    ),
    "soft-targets": ("loss = F.cross_entropy(head(body(x)), torch.randn(8, 3).softmax(-1))",),
    "sigmoid-into-bce": (
        "loss = F.binary_cross_entropy(head(body(x))[:, 0].sigmoid(), (y > 0).float())",
    ),
    "attention-of-gates": (
        "h = body(x)",
        "loss = F.cross_entropy(head(h * h.sigmoid().softmax(-1)), y)",
    ),
    "a-gate": ("loss = F.cross_entropy(head(body(x) * body(x).sigmoid()), y)",),
}


@pytest.mark.parametrize("lines", FAULTS.values(), ids=FAULTS)
def test_twice(tmp_path, lines):
    finding = only(tmp_path, loop(*lines), 29)
    assert "head.weight" in finding.parameters


@pytest.mark.parametrize("lines", CLEAN.values(), ids=CLEAN)
def test_once(tmp_path, lines):
    nothing(tmp_path, loop(*lines))


def test_a_layer_is_named_where_it_was_put_in(tmp_path):
    source = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.out = nn.Softmax(dim=-1)  # FAULT
    def forward(self, x):
        return self.out(self.net(x))
model = Model()
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    loss = nn.CrossEntropyLoss()(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    finding = only(tmp_path, source, 29)
    assert "which applies softmax itself" in finding.what


def test_softmax_over_another_axis_is_not_this(tmp_path):
    source = loop("loss = F.cross_entropy(head(body(x)).softmax(0), y)")
    examination, _ = look(tmp_path, source)
    assert 29 not in [f.number for f in examination.findings]


VOTES = """\
query, labels = nn.Linear(4, 6), F.one_hot(torch.arange(6) % 3, 3).float()
optimizer = torch.optim.Adam(query.parameters())
for step in range(4):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    votes = query(x).softmax(-1) @ labels
    {loss}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_votes_of_attention_are_probabilities(tmp_path):
    only(tmp_path, VOTES.format(loss="loss = F.cross_entropy(votes, y)  # FAULT"), 29)
    nothing(tmp_path, VOTES.format(loss="loss = F.nll_loss((votes + 1e-8).log(), y)"))


TWO_CLASSES = """\
critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.Adam(critic.parameters())
for step in range(4):
    real, fake = torch.randn(8, 4) + 1, torch.randn(8, 4)
    good, bad = {scores}
    loss = F.softplus(-good).mean() + F.softplus(bad).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_loss_of_two_classes_written_by_hand(tmp_path):
    twice = "critic(real).sigmoid(), critic(fake).sigmoid()  # FAULT"
    assert only(tmp_path, TWO_CLASSES.format(scores=twice), 29)
    nothing(tmp_path, TWO_CLASSES.format(scores="critic(real), critic(fake)"))
