"""In tests an error inside a detector is an error; users get a note and go on training."""

import os

import pytest
from torch.distributions import Distribution

from gradient_doctor.session import STRICT

os.environ.setdefault(STRICT, "1")


@pytest.fixture(autouse=True)
def validation_of_distributions():
    """torch.compile switches it off for the whole process, and some faults are seen by it."""
    before = Distribution._validate_args
    yield
    Distribution.set_default_validate_args(before)
