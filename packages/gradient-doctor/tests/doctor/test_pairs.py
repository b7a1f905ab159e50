"""Classes 18, 19 and 33: losses over pairs and over noise."""

import pytest

from doctor.snippets import nothing, only

CONTRAST = """
net = nn.Linear(6, 8)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
labels = (torch.arange(16) + 8) % 16
for step in range(4):
    x = torch.randn(8, 6)
    z = net(torch.cat([x, x + 0.1 * torch.randn_like(x)]))
    {body}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
DIAGONAL = {
    "product": """z = F.normalize(z, dim=1)
    s = z @ z.t() / 0.1  # FAULT
    loss = F.cross_entropy(s, labels)""",
    "cosine": """s = F.cosine_similarity(z[:, None], z[None], dim=-1)  # FAULT
    loss = F.cross_entropy(s / 0.1, labels)""",
}
MASKED = {
    "filled": """z = F.normalize(z, dim=1)
    s = (z @ z.t() / 0.1).masked_fill(torch.eye(16, dtype=torch.bool), -1e9)
    loss = F.cross_entropy(s, labels)""",
    "two-views": """a, b = F.normalize(z, dim=1).chunk(2)
    loss = F.cross_entropy(a @ b.t() / 0.1, torch.arange(8))""",
    "by-norm": """a, b = (z / z.norm(dim=1, keepdim=True)).chunk(2)
    loss = F.cross_entropy(a @ b.t() / 0.1, torch.arange(8))""",
    "over-the-batch": """a, b = (F.normalize(v, dim=0) for v in z.chunk(2))
    loss = (a.t() @ b - torch.eye(8)).square().sum()""",
}


@pytest.mark.parametrize("fault", DIAGONAL)
def test_itself(tmp_path, fault):
    assert "diagonal" in only(tmp_path, CONTRAST.format(body=DIAGONAL[fault]), 19).what


@pytest.mark.parametrize("meant", MASKED)
def test_others(tmp_path, meant):
    nothing(tmp_path, CONTRAST.format(body=MASKED[meant]))


def test_another_axis(tmp_path):
    body = """a, b = z.chunk(2)
    a, b = F.normalize(a, dim=0), F.normalize(b, dim=1)  # FAULT
    loss = F.cross_entropy(a @ b.t() / 0.1, torch.arange(8))"""
    assert "normalised along" in only(tmp_path, CONTRAST.format(body=body), 33).what


TEACHER = """
teacher, student = nn.Linear(6, 4), nn.Linear(6, 4)
optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
for step in range(4):
    x, T = torch.randn(8, 6), 3.0
    with torch.no_grad():
        t = teacher(x)
    s = student(x)
    {body}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
KL = "loss = F.kl_div(log_p, q, reduction='batchmean')"


def test_labels_that_are_spread(tmp_path):
    """No teacher: the neighbours of a label get a share."""
    nothing(tmp_path, TEACHER.format(body="""far = torch.arange(4.0) - 4 * torch.rand(8, 1)
    loss = F.cross_entropy(s, F.softmax(-far.square() / 2.0, 1))"""))  # fmt: skip


def test_one_number_has_a_norm(tmp_path):
    nothing(tmp_path, TEACHER.format(body="""n = s.sum()
    norm = n.norm(dim=0)
    loss = norm + F.normalize(n, dim=0) + F.cosine_similarity(s, s).sum()"""))  # fmt: skip


def test_one_temperature(tmp_path):
    only(tmp_path, TEACHER.format(body=f"""log_p = F.log_softmax(s / T, 1)
    q = F.softmax(t, 1)  # FAULT
    {KL}"""), 18)  # fmt: skip
    only(tmp_path, TEACHER.format(body=f"""log_p = F.log_softmax(s, 1)  # FAULT
    q = F.softmax(t / T, 1)
    {KL}"""), 18)  # fmt: skip


@pytest.mark.parametrize("pair", [("s / T", "t / T"), ("s", "t"), ("s", "t / 0.4")])
def test_two_temperatures(tmp_path, pair):
    body = f"log_p, q = F.log_softmax({pair[0]}, 1), F.softmax({pair[1]}, 1)\n    {KL}"
    nothing(tmp_path, TEACHER.format(body=body))


NOISE = """
net = nn.Linear(7, 6)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
levels = torch.linspace(0.1, 0.9, 10)
for step in range(4):
    x, t = torch.randn(8, 6), torch.randint(0, 10, (8,))
    a, noise = levels[t][:, None], torch.randn(8, 6)
    noisy = a.sqrt() * x + (1 - a).sqrt() * noise
    {body}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_noise_of_its_own(tmp_path):
    body = """other = torch.randn_like(x)  # FAULT
    loss = F.mse_loss(net(torch.cat([noisy, a], 1)), other)"""
    assert "noise" in only(tmp_path, NOISE.format(body=body), 18).what


@pytest.mark.parametrize("target", ["noise", "x", "noise - x"])
def test_noise_that_was_added(tmp_path, target):
    nothing(
        tmp_path, NOISE.format(body=f"loss = F.mse_loss(net(torch.cat([noisy, a], 1)), {target})")
    )


def test_made_up_answers(tmp_path):
    """Noise of a fixed amount belongs to data that are made up, too."""
    script = """
net = nn.Linear(6, 6)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(4):
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    loss = F.mse_loss(net(x + 0.1 * torch.randn_like(x)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    nothing(tmp_path, script)
