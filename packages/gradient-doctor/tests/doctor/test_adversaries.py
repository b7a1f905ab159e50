"""Class 32: a generator that is taught to be found out."""

import pytest

from doctor.snippets import nothing, only

GAN = """
make, judge = nn.Linear(4, 2), nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 1))
maker = torch.optim.Adam(make.parameters(), lr=1e-4)
judges = torch.optim.Adam(judge.parameters(), lr=1e-4)
bce, yes, no = F.binary_cross_entropy_with_logits, torch.ones(16, 1), torch.zeros(16, 1)
for step in range(4):
    real, made = torch.randn(16, 2) + 1, make(torch.randn(16, 4))
    critic = {critic}
    judges.zero_grad()
    critic.backward()
    judges.step()
    judged = judge({again})
    loss = {loss}  # FAULT
    maker.zero_grad()
    loss.backward()
    maker.step()
"""
LABELS = "bce(judge(real), yes) + bce(judge(made.detach()), no)"
SCORES = "judge(made.detach()).mean() - judge(real).mean()"
TURNED = "bce(judge(real), no) + bce(judge(made.detach()), yes)"
HINGE = "F.relu(1 - judge(real)).mean() + F.relu(1 + judge(made.detach())).mean()"
AGAIN = "make(torch.randn(16, 4))"
FAULTS = {
    "labels": (LABELS, "made", "bce(judged, no)"),
    "squares": (LABELS.replace("bce", "F.mse_loss"), "made", "F.mse_loss(judged, no)"),
    "scores": (SCORES, AGAIN, "judged.mean()"),
    "minimax-of-yes": (LABELS, "made", "-bce(judged, yes)"),
}
RIGHT = {
    "labels": (LABELS, "made", "bce(judged, yes)"),
    "minimax": (LABELS, "made", "-bce(judged, no)"),
    "squares": (LABELS.replace("bce", "F.mse_loss"), "made", "F.mse_loss(judged, yes)"),
    "scores": (SCORES, AGAIN, "-judged.mean()"),
    "turned-labels": (TURNED, "made", "bce(judged, no)"),
    "hinge": (HINGE, "made", "-judged.mean()"),
}


def script(critic, again, loss):
    return GAN.format(critic=critic, again=again, loss=loss)


@pytest.mark.parametrize("fault", FAULTS)
def test_found_out(tmp_path, fault):
    assert "found out" in only(tmp_path, script(*FAULTS[fault]), 32).what


@pytest.mark.parametrize("right", RIGHT)
def test_adversaries(tmp_path, right):
    nothing(tmp_path, script(*RIGHT[right]))


def test_domain_labels(tmp_path):
    """A classifier of domains and the features that fool it, with labels of both kinds."""
    nothing(
        tmp_path,
        """
features, domain = nn.Linear(4, 6), nn.Linear(6, 1)
one = torch.optim.Adam(features.parameters())
two = torch.optim.Adam(domain.parameters())
bce = F.binary_cross_entropy_with_logits
for step in range(4):
    a, b = torch.randn(8, 4), torch.randn(8, 4) + 1
    loss = bce(domain(features(a).detach()), torch.zeros(8, 1))
    loss = loss + bce(domain(features(b).detach()), torch.ones(8, 1))
    two.zero_grad()
    loss.backward()
    two.step()
    fool = bce(domain(features(b)), torch.zeros(8, 1))
    one.zero_grad()
    fool.backward()
    one.step()
""",
    )
