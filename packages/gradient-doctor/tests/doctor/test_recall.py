"""A training that is resumed in another process: the report is of all its parts."""

import json

import pytest
import torch

from doctor.stub import Stub, use
from gradient_doctor import Doctor
from gradient_doctor.findings import Finding, Severity, Site
from gradient_doctor.session import Detector


class PerStep(Detector):
    """A finding of every step, at a line and about a parameter of its own."""

    def step_ended(self, record):
        step = self.session.step
        self.report(
            5, Severity.WARNING, f"1 parameter of step {step}.", why=f"It is {step % 2}.", fix="-",
            site=Site("train.py", 7 + step // 2, "step", f"part{step}"), parameters=(f"w{step}",),
        )  # fmt: skip


class Ages(Detector):
    def __init__(self, session):
        super().__init__(session)
        self.seen = []
        session.ages = self.seen

    def step_ended(self, record):
        self.seen.append((record.number, self.session.age, record.traced))


def examined(steps, memory=None, **options):
    """(a doctor after so many steps of a loop, its memory after the last of them).

    `memory`: of the part before. It goes through a file, as trainer_state.json is one; a process
    that is killed takes none at its end.
    """
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    doctor = Doctor({"model": model}, {"optimizer": optimizer}, **options)
    if memory is not None:
        doctor.recall(memory)
    with doctor:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).mean().backward()
            optimizer.step()
            doctor.step()
        kept = json.loads(json.dumps(doctor.memory()))
    return doctor, kept


@pytest.mark.parametrize("parts", [(1, 3), (2, 2), (3, 1), (1, 1, 1, 1), (4, 0)])
def test_parts_report_what_the_whole_does(monkeypatch, parts):
    """What is found of a step is the same with and without a resume before it."""
    use(monkeypatch, PerStep)
    whole, _ = examined(4)
    memory = None
    for steps in parts:
        doctor, memory = examined(steps, memory)
    assert doctor.session.step == 4
    assert len(doctor.findings) == 3  # two steps at one line are one finding
    assert doctor.to_json() == whole.to_json()


def test_without_it_the_first_part_is_lost(monkeypatch):
    use(monkeypatch, PerStep)
    (whole, _), (last, _) = examined(4), examined(2)
    assert last.to_json() != whole.to_json()


def test_a_part_is_traced_like_a_training_of_its_own(monkeypatch):
    use(monkeypatch, Ages)
    first, memory = examined(5, trace_steps=2)
    assert [age for _, age, _ in first.session.ages[:5]] == [0, 1, 2, 3, 4]
    again, _ = examined(3, memory, trace_steps=2)
    assert again.session.ages[:3] == [(5, 0, True), (6, 1, True), (7, 2, False)]


def test_a_repetition_changes_nothing(monkeypatch):
    use(monkeypatch, Stub, when="step")
    first, memory = examined(2)
    again, _ = examined(2, memory)
    assert again.findings == first.findings
    assert again.session.step == 4


@pytest.mark.parametrize(
    "memory",
    [
        None,
        [],
        {},
        {"schema": 1, "steps": -1, "findings": []},
        {"schema": 1, "steps": "4", "findings": []},
        {"schema": 7, "steps": 4, "findings": []},
        {"schema": 1, "steps": 4},
        {"schema": 1, "steps": 4, "findings": [{"whole": {}, "parts": []}]},
        {"schema": 1, "steps": 4, "findings": [3]},
    ],
)
def test_what_is_no_memory_is_refused_whole(memory):
    doctor = Doctor({"model": torch.nn.Linear(2, 1)})
    with pytest.raises(ValueError, match=r"expected|not (a )?stored finding"):
        doctor.recall(memory)
    assert (doctor.findings, doctor.session.step) == ([], 0)


def test_a_finding_and_its_dict():
    site = Site("train.py", 7, "step", "model.body")
    finding = Finding(
        20, Severity.ERROR, "All zero.", "So.", "Fix.", site, ("a", "b"), 3, (Site("x.py", 1),)
    )
    assert Finding.from_dict(json.loads(json.dumps(finding.to_dict()))) == finding
    bare = Finding(0, Severity.NOTE, "What.", "Why.", "Fix.")
    assert Finding.from_dict(bare.to_dict()) == bare
    with pytest.raises(ValueError, match=r"not a stored finding: .*do not fit together"):
        Finding.from_dict({**finding.to_dict(), "class": "another"})
