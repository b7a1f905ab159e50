# Written by docs/make_reference.py from _HOME: `make docs` writes it again.
from gradient_doctor.conformance import check_entropy
from gradient_doctor.doctor import Doctor
from gradient_doctor.findings import Finding, Severity, Site
from gradient_doctor.preflight import preflight
from gradient_doctor.score import ScoreTest, score_test

__all__ = [
    "Doctor",
    "Finding",
    "ScoreTest",
    "Severity",
    "Site",
    "check_entropy",
    "preflight",
    "score_test",
]
