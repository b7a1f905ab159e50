"""Class 18: predictions that are compared with the targets of other samples."""

import pytest

from doctor.snippets import nothing, only

DATA = """
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
inputs = torch.rand(48, 6)
answers = inputs.sum(1, keepdim=True)
for epoch in range(2):
    order, other = torch.randperm(48), torch.randperm(48)
    for k in range(0, 48, 16):
        {body}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
FAULTS = {
    "one-side": """x = inputs[order[k : k + 16]]  # FAULT
        loss = F.mse_loss(net(x), answers[k : k + 16])""",
    "two-orders": """x, at = inputs[order[k : k + 16]], other[k : k + 16]
        y = answers[at]  # FAULT
        loss = (net(x) - y).square().mean()""",
    "a-batch": """x, y = inputs[k : k + 16].clone(), answers[k : k + 16].clone() + 0 * k
        x = inputs[order]  # FAULT
        loss = F.l1_loss(net(x), answers)""",
    "repeated": """x, y = inputs[:6], answers[:6]
        x = torch.cat([x.repeat_interleave(4, dim=0)[:, :3], torch.randn(24, 3)], 1)
        y = y.repeat(4, 1)  # FAULT
        loss = F.mse_loss(net(x), y)""",
}
MEANT = {
    "both": """at = order[k : k + 16]
        loss = F.mse_loss(net(inputs[at]), answers[at])""",
    "before": """x, y = inputs[order], answers[order]
        loss = F.mse_loss(net(x[k : k + 16]), y[k : k + 16])""",
    "mixed": """x, y, at = inputs[:16], answers[:16], torch.randperm(16)
        out = net(0.7 * x + 0.3 * x[at])
        loss = 0.7 * F.mse_loss(out, y) + 0.3 * F.mse_loss(out, y[at])""",
    "wrong-on-purpose": """out = net(inputs[order[:16]])
        loss = F.binary_cross_entropy_with_logits(out, torch.zeros(16, 1))""",
    "all-pairs": """x, y = inputs[:4], answers[:4]
        loss = F.mse_loss(net(x.repeat_interleave(4, dim=0)), y.repeat(4, 1))""",
    "put-back": """out = net(inputs[order])[order.argsort()]
        loss = F.mse_loss(out, answers)""",
    "summed-after": """x = inputs[order]
        loss = F.mse_loss(net(x).squeeze(1), x.sum(1))""",
    "gathered": """y = answers.squeeze(1).gather(0, order)
        loss = F.mse_loss(net(inputs[order]).squeeze(1), y)""",
    "by-python": """y = torch.tensor([float(answers[i]) for i in order])
        loss = F.mse_loss(net(inputs[order]).squeeze(1), y)""",
    "places": """loss = F.mse_loss(net(inputs[order]), torch.arange(48.0)[:, None])""",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_samples(tmp_path, fault):
    assert "other samples" in only(tmp_path, DATA.format(body=FAULTS[fault]), 18).what


@pytest.mark.parametrize("meant", MEANT)
def test_their_own(tmp_path, meant):
    nothing(tmp_path, DATA.format(body=MEANT[meant]))
