"""The momentum of a step, batch by batch, with the tokens behind it: from momentum.parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from entropy_experiments.report.momentum import split_of
from entropy_experiments.report.sections import MomentumBatchRow, MomentumSection, MomentumToken
from entropy_experiments.results import EvaluationBatch
from entropy_experiments.study_files import RunFiles

if TYPE_CHECKING:
    import pyarrow

FILE = "momentum.parquet"
TOKENS = 8
"""Of each batch, those of most influence."""
BEFORE, AFTER = 20, 6
"""Tokens shown around each."""


def momentum_section(run: RunFiles, evaluation: EvaluationBatch) -> MomentumSection | None:
    """None: the momentum is one line of the ledger."""
    momentum = split_of(evaluation)
    if momentum is None:
        return None
    table = run.table(FILE)
    step_T = table.column("step").to_numpy()
    rows: list[MomentumBatchRow] = []
    for batch in momentum["batches"]:
        own = table.take(np.flatnonzero(step_T == batch["step"]))
        rows.append(
            {
                "step": batch["step"],
                "value": batch["dH"],
                "stderr": batch["stderr"],
                "weight": batch["weight"],
                "other_gradient": batch["other_gradient"],
                "tokens": _tokens(own),
            }
        )
    return {"total": momentum["total"], "rows": rows}


def _tokens(table: pyarrow.Table) -> list[MomentumToken]:
    """The largest, with the text around them; a rollout's tokens are neighbours in the table."""
    dH, a, b, rollout = (
        table.column(name).to_pylist() for name in ("dH", "dH_a", "dH_b", "rollout")
    )
    texts, position = (table.column(name).to_pylist() for name in ("text", "position"))
    largest = sorted(range(len(dH)), key=lambda at: (-abs(dH[at]), at))[:TOKENS]

    def around(low: int, high: int, own: int) -> str:
        inside = range(max(low, 0), min(high, len(texts)))
        return "".join(texts[at] for at in inside if rollout[at] == own)

    return [
        {
            "before": around(at - BEFORE, at, rollout[at]),
            "text": texts[at],
            "after": around(at + 1, at + 1 + AFTER, rollout[at]),
            "rollout": rollout[at],
            "position": position[at],
            "value": dH[at],
            "stderr": abs(a[at] - b[at]),
        }
        for at in largest
        if dH[at]
    ]
