"""Small training scripts for the tests of single rules; `# FAULT` marks the line to be named."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import torch

from doctor.harness import MARK, marked_lines

HEAD = """\
import copy
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
"""
# body and head; `{body}` makes a loss from x and y
LOOP = """
body = nn.Linear(4, 8)
head = nn.Linear(8, 3)
optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()])
for step in range(4):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
{body}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def loop(*lines: str) -> str:
    return LOOP.format(body="\n".join(f"    {line}" for line in lines))


def look(folder: Path, source: str, **options: Any) -> tuple[Any, tuple[int, ...]]:
    """The examination of a script, and its marked lines."""
    from gradient_doctor.script import examine

    text = HEAD + source
    path = folder / "snippet.py"
    path.write_text(text.replace(f"  {MARK}", ""))
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            return examine(path, **options), marked_lines(text)
        finally:
            torch.set_grad_enabled(True)  # some of the scripts leave it off


def serious(examination: Any) -> list[Any]:
    return [f for f in examination.findings if f.severity >= 2 and f.number != 0]


def only(folder: Path, source: str, number: int, **options: Any) -> Any:
    """The one serious finding, of this class and on the marked line."""
    examination, lines = look(folder, source, **options)
    shown = "\n".join(map(str, examination.findings)) or repr(examination.error)
    found = serious(examination)
    assert [f.number for f in found] == [number], shown
    assert found[0].site is not None, shown
    assert found[0].site.line in lines, shown
    return found[0]


def nothing(folder: Path, source: str, **options: Any) -> None:
    examination, _ = look(folder, source, **options)
    assert examination.error is None, examination.error
    assert not serious(examination), "\n".join(map(str, examination.findings))
