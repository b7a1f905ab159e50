"""Class 33: a softmax over another axis than the one that is summed away."""

import pytest

from doctor.snippets import nothing, only

HEADS = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        q, k, v = (f(x).view(4, 5, 2, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        {body}
        return out.transpose(1, 2).reshape(4, 5, 8)

model, head = Attention(), nn.Linear(8, 1)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
for step in range(4):
    x, y = torch.randn(4, 5, 8), torch.randn(4, 1)
    loss = F.mse_loss(head(model(x).mean(1)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
FAULTS = {
    "queries": """w = torch.softmax(q @ k.transpose(-2, -1) / 2, dim=2)  # FAULT
        out = w @ v""",
    "heads": """w = F.softmax((q @ k.mT) * 0.5, dim=1)  # FAULT
        out = torch.matmul(F.dropout(w, 0.1), v)""",
    "einsum": """scores = torch.einsum("bhqd,bhkd->bhqk", q, k)
        w = scores.softmax(dim=-2)  # FAULT
        out = torch.einsum("bhqk,bhkd->bhqd", w, v)""",
    "one-axis-of-heads": """scores = (q @ k.transpose(-2, -1)).view(8, 5, 5)
        w = scores.softmax(1)  # FAULT
        out = torch.bmm(w, v.reshape(8, 5, 4)).view(4, 2, 5, 4)""",
}
MEANT = {
    "keys": "out = torch.softmax(q @ k.transpose(-2, -1), dim=-1) @ v",
    "slots": """w = torch.softmax(q @ k.transpose(-2, -1), dim=2) + 1e-8
        out = (w / w.sum(-1, keepdim=True)) @ v""",
    "keys-first": """w = (k @ q.transpose(-2, -1)).softmax(2)
        out = w.transpose(-2, -1) @ v""",
    "linear": "out = q.softmax(-1) @ (k.softmax(-2).transpose(-2, -1) @ v)",
    "einsum": """w = torch.einsum("bhkd,bhqd->bhkq", k, q).softmax(2)
        out = torch.einsum("bhkq,bhkd->bhqd", w, v)""",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_queries_compete(tmp_path, fault):
    assert "sums over" in only(tmp_path, HEADS.format(body=FAULTS[fault]), 33).what


@pytest.mark.parametrize("meant", MEANT)
def test_keys_compete(tmp_path, meant):
    nothing(tmp_path, HEADS.format(body=MEANT[meant]))


def test_clusters(tmp_path):
    """Soft assignments sum to 1 over the clusters, and are summed over the members."""
    nothing(
        tmp_path,
        """
assign, head = nn.Linear(8, 3), nn.Linear(24, 1)
optimizer = torch.optim.Adam([*assign.parameters(), *head.parameters()])
for step in range(4):
    x, y = torch.randn(4, 5, 8), torch.randn(4, 1)
    s = assign(x).softmax(-1)
    pooled = s.transpose(1, 2) @ x
    loss = F.mse_loss(head(pooled.flatten(1)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    )


def test_clusters_that_are_computed(tmp_path):
    """Soft assignments to centres of length 1."""
    nothing(
        tmp_path,
        """
feed, head = nn.Linear(8, 6), nn.Linear(18, 1)
centres = nn.Parameter(torch.randn(3, 6))
optimizer = torch.optim.Adam([centres, *feed.parameters(), *head.parameters()])
for step in range(4):
    x, y = feed(torch.randn(4, 5, 8)), torch.randn(4, 1)
    s = torch.einsum("bnd,kd->bnk", x, F.normalize(centres, dim=-1)).softmax(-1)
    pooled = torch.einsum("bnk,bnd->bkd", s, x)
    loss = F.mse_loss(head(pooled.flatten(1)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""",
    )


STATES = """
rnn, encode, head = nn.GRU(3, 8, num_layers=2), nn.Linear(5, 16), nn.Linear(8, 1)
parts = nn.ModuleList([rnn, encode, head])
optimizer = torch.optim.Adam(parts.parameters(), lr=1e-3)
for step in range(4):
    start = encode(torch.randn(4, 5))
    {body}
    out, _ = rnn(torch.randn(6, 4, 3), torch.tanh(state))
    loss = (head(out[-1]) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_the_state_of_a_recurrent_layer(tmp_path):
    """[batch, layers * width] is no [layers, batch, width], also where the batch is even."""
    assert (
        "exchange"
        in only(tmp_path, STATES.format(body="state = start.view(2, 4, 8)  # FAULT"), 33).what
    )
    fault = "state = start.view(4, 2, 8).reshape(2, 4, 8)  # FAULT"
    assert "exchange" in only(tmp_path, STATES.format(body=fault), 33).what
    nothing(
        tmp_path, STATES.format(body="state = start.view(4, 2, 8).transpose(0, 1).contiguous()")
    )
    nothing(tmp_path, STATES.format(body="state = torch.cat(start.chunk(2, 1)).view(2, 4, 8)"))
