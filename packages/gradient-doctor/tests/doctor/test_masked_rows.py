"""Class 19: masks of padding on the wrong axis of an attention matrix."""

import pytest

from doctor.look import look

LOOP = """\
emb, query, key, out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
parts = (emb, query, key, out)
optimizer = torch.optim.Adam([p for m in parts for p in m.parameters()])
for step in range(4):
    ids = torch.randint(1, 9, (3, 6))
    ids[0, 4:] = 0
    ids[2, 3:] = 0
    real = ids != 0
    x = emb(ids)
    q, k = query(x)[:, None], key(x)[:, None]
    scores = q @ k.mT / 2
{attend}
    y = (a @ x[:, None]).squeeze(1) if a.shape[-1] == 6 else a.squeeze(1)
    pooled = (y * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    loss = F.cross_entropy(out(pooled), ids[:, 0] % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
WRONG = {
    "filled": (
        "mask = real.unsqueeze(1).unsqueeze(3)  # HERE",
        "a = scores.masked_fill(mask == 0, -1e9).softmax(-1)",
    ),
    "added": (
        "mask = real.float()[:, None, :, None]  # HERE",
        "a = (scores + (1 - mask) * -1e4).softmax(dim=-1)",
    ),
    "fused": (
        "mask = real.unsqueeze(1).unsqueeze(-1)",
        "mask = mask.expand(3, 1, 6, 6)  # HERE",
        "a = F.scaled_dot_product_attention(q, k, x[:, None], torch.where(mask, 0.0, -1e9))",
    ),
}
RIGHT = {
    "keys": ("a = scores.masked_fill(~real[:, None, None], -1e9).softmax(-1)",),
    "both": (
        "a = scores.masked_fill(~real[:, None, None], -1e9)",
        "a = a.masked_fill(~real[:, None, :, None], -1e9).softmax(-1)",
    ),
    "one-mask-for-both": (
        "both = real[:, None, None] & real[:, None, :, None]",
        "a = scores.masked_fill(~both, -1e9).softmax(-1)",
    ),
    "after": ("a = scores.softmax(-1) * real[:, None, None] * real[:, None, :, None]",),
    "causal": ("a = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(-1)",),
}


def loop(tmp_path, lines):
    return look(tmp_path, LOOP.format(attend="\n".join("    " + line for line in lines)))


@pytest.mark.parametrize("lines", WRONG.values(), ids=WRONG)
def test_rows_are_masked_and_keys_are_not(tmp_path, lines):
    assert "no keys" in loop(tmp_path, lines).one(19).what


@pytest.mark.parametrize("lines", RIGHT.values(), ids=RIGHT)
def test_masks_that_hide_keys(tmp_path, lines):
    loop(tmp_path, lines).clean()
