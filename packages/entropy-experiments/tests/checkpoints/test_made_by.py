"""The report's sentence calls a step training's only where that was checked."""

from __future__ import annotations

import pytest

from entropy_experiments.report.html.words import made_by_study, made_by_training

pytestmark = pytest.mark.naive

TRAININGS = "The update that training made after step_5"
UNCHECKED = "The update that the batch recorded after step_5 makes (not checked against"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"step_certificate": {"apart": False}}, TRAININGS),
        ({"made_step": {"of_recorded_gradient": True}}, TRAININGS),
        ({"step_certificate": {"passed": True}}, TRAININGS),  # of the version before
        ({}, UNCHECKED),
        ({"step_certificate": None, "made_step": {"of_recorded_gradient": False}}, UNCHECKED),
        ({"step_certificate": {"apart": True}}, "A rebuilt update, not the step that training"),
        ({"made_step": {"altered": ["loss"]}}, "A hypothetical update from step_5, training"),
        ({"update": "hypothetical"}, "A hypothetical update from step_5"),
    ],
)
def test_a_probe(found, words):
    assert made_by_training({"checkpoint": "step_5", "update": "recorded", **found}).startswith(
        words
    )


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"real": True, "certified": {"step_distance": 1e-6}}, TRAININGS),
        ({"real": True, "certified": {}}, TRAININGS),  # an online ledger: the live step itself
        ({"real": True, "certified": {"unchecked": "no checkpoint follows"}}, UNCHECKED),
        ({"real": False, "certified": {}}, "A hypothetical update from step_5"),
    ],
)
def test_a_study(update, words):
    assert made_by_study({"checkpoint": "step_5", "update": update}).startswith(words)
