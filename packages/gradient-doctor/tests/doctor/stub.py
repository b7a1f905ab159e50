"""A detector for tests of what is around detectors, and the small loops that they watch."""

from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector

LOOP = """\
import torch

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.ones(3, 2)).mean().backward()
    optimizer.step()
"""


class Stub(Detector):
    """Finds what `severity` says, when it is told to, in every run."""

    severity: Severity | None = Severity.WARNING
    when = "finish"

    def _find(self):
        if self.severity is not None:
            self.report(
                5, self.severity, "Found by a stub.", why="It always is.", fix="None.",
                site=Site("train.py", 7), parameters=("model.weight",),
            )  # fmt: skip

    def step_ended(self, record):
        if self.when == "step":
            self._find()

    def finish(self, error):
        if self.when == "finish":
            self._find()


class Broken(Detector):
    def step_ended(self, record):
        raise ZeroDivisionError("a mistake of our own")


def use(monkeypatch, *detectors, **settings):
    """Have these detectors and no others."""
    monkeypatch.setattr("gradient_doctor.detectors.DETECTORS", detectors)
    for name, value in settings.items():
        monkeypatch.setattr(Stub, name, value)
