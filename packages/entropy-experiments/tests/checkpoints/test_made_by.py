"""The report's sentence calls a step training's only where that was checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from entropy_experiments.pipelines.influence import certified
from entropy_experiments.report.words import made_by_study, made_by_training
from entropy_experiments.update.certificate import FingerprintCertificate

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
        ({"update": "imported"}, "The step from this batch at step_5 (not checked against"),
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
        (
            {"real": False, "certified": {"unchecked": "no checkpoint follows"}},
            "The step from this batch at step_5 (not checked against",
        ),
        (
            {"real": False, "certified": {"unchecked": "none", "another_step": "88% away"}},
            "A hypothetical update from step_5",
        ),
        ({"real": False, "certified": {}}, "A hypothetical update from step_5"),
    ],
)
def test_a_study(update, words):
    assert made_by_study({"checkpoint": "step_5", "update": update}).startswith(words)


@pytest.mark.parametrize(
    ("gradient_distance", "advice"),
    [
        (0.2, "`entropy-probe run` analyses the whole step, by the gradient that training"),
        # The gradient is the recorded one and the step is not: another hand was at work.
        (0.0, "`entropy-probe run` does not trust it either"),
    ],
)
def test_a_refused_study_points_to_run_where_run_is_trusted(monkeypatch, gradient_distance, advice):
    certificate = FingerprintCertificate(relative_error=1.0, cosine=0.0)
    monkeypatch.setattr(certified, "certificate_of", lambda probe, direction: (certificate, ""))
    probe = SimpleNamespace(
        real=True,
        bound=True,
        has_gradient=True,
        reasons=(),
        other_start="",
        checkpoint=SimpleNamespace(recorded="update_batch", other_count=""),
        gradient_distance=lambda gradient: gradient_distance,
    )
    with pytest.raises(ValueError, match=advice):
        certified.certified_step(cast(Any, probe), cast(Any, None), {})
