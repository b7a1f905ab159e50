"""In tests an error inside a detector is an error; users get a note and go on training."""

import os

from gradient_doctor.session import STRICT

os.environ.setdefault(STRICT, "1")
