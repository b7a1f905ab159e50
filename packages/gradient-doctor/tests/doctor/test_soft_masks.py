"""Class 19: a mask before a softmax that hides nothing."""

import pytest

from doctor.snippets import nothing, only

POOL = """
score, head = nn.Linear(6, 1), nn.Linear(6, 2)
optimizer = torch.optim.Adam([*score.parameters(), *head.parameters()])
for step in range(4):
    x, y = torch.randn(8, 7, 6), torch.randint(2, (8,))
    mask = torch.arange(7)[None] < torch.randint(2, 7, (8, 1))
    e = score(x).squeeze(-1)
    {body}
    loss = F.cross_entropy(head((w.unsqueeze(-1) * x).sum(1)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
FAULTS = {
    "tiny": "w = e.masked_fill(~mask, 1e-9).softmax(1)  # FAULT",
    "product": "w = torch.softmax(e * mask.float(), dim=-1)  # FAULT",
    "where": "w = torch.where(mask, e, torch.tensor(0.0)).softmax(dim=1)  # FAULT",
    "sum": "w = F.softmax(e + mask.float(), dim=1)  # FAULT",
}
MEANT = {
    "hidden": "w = e.masked_fill(~mask, -1e9).softmax(1)",
    "infinite": "w = (e + torch.where(mask, 0.0, float('-inf'))).softmax(1)",
    "mended": """w = torch.softmax(e * mask, dim=1) * mask
    w = w / w.sum(1, keepdim=True)""",
    "no-mask": "w = torch.softmax(e * torch.rand(8, 7), dim=1)",
    "whole-rows": "w = (e * (torch.arange(8) > 2).float().unsqueeze(1).expand(8, 7)).softmax(1)",
}
ATTENTION = """
take = nn.Linear(6, 18)
optimizer = torch.optim.Adam(take.parameters())
for step in range(4):
    q, k, v = take(torch.randn(4, 5, 6)).chunk(3, -1)
    {body}
    loss = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("fault", FAULTS)
def test_nothing_is_hidden(tmp_path, fault):
    assert "hides nothing" in only(tmp_path, POOL.format(body=FAULTS[fault]), 19).what


@pytest.mark.parametrize("meant", MEANT)
def test_masked(tmp_path, meant):
    nothing(tmp_path, POOL.format(body=MEANT[meant]))


def test_a_mask_that_attention_adds(tmp_path):
    only(tmp_path, ATTENTION.format(body="mask = torch.ones(5, 5).tril()  # FAULT"), 19)
    nothing(tmp_path, ATTENTION.format(body="mask = torch.ones(5, 5).tril().bool()"))
    nothing(tmp_path, ATTENTION.format(body="mask = torch.rand(5, 5)"))
