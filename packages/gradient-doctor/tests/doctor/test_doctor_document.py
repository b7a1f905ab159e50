"""docs/doctor.md names every class as the code does, and every option and exit code."""

import re

from checkout import DOCS
from gradient_doctor.classes import CLASSES
from gradient_doctor.command import PROG, _parser

TEXT = (DOCS / "doctor.md").read_text()


def test_the_table_is_the_code():
    table = TEXT.split("## The classes")[1].split("## Blind spots")[0]
    rows = re.findall(r"^\| (\d+) \| `([\w-]+)` \| .+ \| .+ \|$", table, re.MULTILINE)
    assert rows == [(str(n), c.slug) for n, c in CLASSES.items() if n]


def test_every_option_is_there():
    for action in _parser(PROG)._actions:
        for option in action.option_strings:
            assert option in TEXT or option in ("-h", "--help")
