"""Write docs/architectures.md: the sweep over every causal-LM type, and its table.

    python docs/make_architectures.py      # minutes; after the scores, or transformers, changed

The page is committed. The slow test models/test_every_architecture.py makes the same numbers
and asserts that its lines are those of the page.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "packages" / "entropy-experiments" / "tests"))

from oracles.every_causal_lm import NOT_BUILT, TYPES  # noqa: E402
from oracles.sweep import sweep  # noqa: E402
from oracles.sweep_page import line, page  # noqa: E402

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # transformers' own, about configs made small
    rows = {}
    for kind in TYPES:
        if kind not in NOT_BUILT:
            rows[kind] = list(sweep(kind))
            print(line(kind, rows[kind]), *rows[kind], sep="", flush=True)
    (DOCS / "architectures.md").write_text(page(rows))
