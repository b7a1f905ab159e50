"""The report's sentence calls a step training's only where nothing says that it is another."""

from __future__ import annotations

from entropy_experiments.report.html.words import made_by


def test_a_step_that_is_apart_is_not_called_training_s():
    assert made_by("step_5", True) == "The update that training made after step_5"
    close, far = {"apart": False}, {"apart": True}
    assert made_by("step_5", True, certificate=close).startswith("The update that training made")
    assert made_by("step_5", True, certificate=far).startswith("A rebuilt update, not the step")
    assert made_by("step_5", False) == "A hypothetical update from step_5"
