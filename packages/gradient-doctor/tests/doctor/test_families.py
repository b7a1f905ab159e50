"""The same mistakes in many dresses: other loops, other styles of modules, functions, closures.

`families/faults.txt` has small programs: name, classes that fit, and `# FAULT` on the lines that
one would change. `families/clean.txt` has relatives of them that are right, and long-known recipes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from doctor.snippets import look, serious

HERE = Path(__file__).parent / "families"
IMPORTS = """
import math, random
import numpy as np
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset
np.random.seed(0); random.seed(0)
"""


def programs(name):
    text = (HERE / name).read_text()
    for part in re.split(r"^=== ", text, flags=re.MULTILINE)[1:]:
        head, body = part.split("\n", 1)
        title, *classes = head.split()
        yield pytest.param(classes, IMPORTS + body, id=title)


@pytest.mark.parametrize(("classes", "source"), list(programs("faults.txt")))
def test_the_class_and_the_line_of_a_fault(tmp_path, classes, source):
    examination, lines = look(tmp_path, source)
    found = serious(examination)
    exact = [f for f in found if f.slug in classes and f.site and f.site.line in lines]
    assert exact, "\n".join(map(str, examination.findings)) or repr(examination.error)


@pytest.mark.parametrize(("classes", "source"), list(programs("clean.txt")))
def test_nothing_about_a_program_that_is_right(tmp_path, classes, source):
    assert classes == ["clean"]
    examination, _ = look(tmp_path, source)
    assert examination.error is None, examination.error
    assert not serious(examination), "\n".join(map(str, examination.findings))
