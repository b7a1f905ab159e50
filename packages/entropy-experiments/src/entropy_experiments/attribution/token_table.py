"""A token table read back from a file: all that a what-if needs, without a model.

`token_rows` has a row per response token with its scores, advantage, old and reference log-probs,
and the slopes D_u l and D_u h; `facts` are the few numbers of the step that are no column. What a
table does not hold, and a what-if does not need, are the prompts' tokens and g_H.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.attribution.tokens import TokenInfluence
from entropy_experiments.types import Rollouts, Scores, UpdateBatch
from entropy_experiments.update.objective import Objective, token_coefficients

NEEDED = (
    "rollout",
    "prompt",
    "position",
    "token_id",
    "logprob",
    "entropy",
    "advantage",
    "reward",
    "old_logprob",
    "ref_logprob",
    "weight",
    "microbatch",
    "coefficient_logprob",
    "coefficient_entropy",
    "slope_logprob",
    "slope_entropy",
    "counted",
)
SAME = 1e-9
"""Of the largest coefficient: both are fp64."""
Rows = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenTable:
    """The fields are those of `attribution.tokens.TokenInfluence`."""

    batch: UpdateBatch
    objective: Objective
    scores: Scores
    slope_K: Scores
    lr: float
    clip_factor: float
    baseline: Mapping[str, float]
    share_K: Tensor | None
    baseline_K: Tensor | None
    """What fold k says of the whole baseline; None: it was not saved."""

    @property
    def counted_NS(self) -> Tensor:
        return self.batch.counted_NS

    @classmethod
    def from_rows(cls, rows: Rows, facts: Mapping[str, Any]) -> TokenTable:
        """From the columns of `token_rows` (with those of `fold_columns`, if saved)."""
        _check_rows(rows, facts)
        place = (_column(rows, "rollout", torch.int64), _column(rows, "position", torch.int64))
        n, s = (int(index.max()) + 1 for index in place)

        def spread(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(n, s, dtype=dtype).index_put(place, _column(rows, name, dtype))

        def per_rollout(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(n, dtype=dtype).index_put(place[:1], _column(rows, name, dtype))

        def recorded(name: str) -> bool:
            return not bool(_column(rows, name, torch.float64).isnan().all())

        response_NS = torch.zeros(n, s, dtype=torch.bool).index_put(place, torch.tensor(True))
        counted_NS = spread("counted", torch.bool)
        microbatch_N = per_rollout("microbatch", torch.int64)
        batch = UpdateBatch(
            rollouts=Rollouts(
                tokens_NS=spread("token_id", torch.int64),
                attention_NS=_attention(response_NS),
                response_NS=response_NS,
                prompt_N=per_rollout("prompt", torch.int64),
                weight_N=per_rollout("weight"),
            ),
            advantage_NS=spread("advantage"),
            reward_N=per_rollout("reward") if recorded("reward") else None,
            old_logprob_NS=spread("old_logprob") if recorded("old_logprob") else None,
            ref_logprob_NS=spread("ref_logprob") if recorded("ref_logprob") else None,
            microbatch_N=microbatch_N if bool((microbatch_N >= 0).all()) else None,
            loss_NS=None if torch.equal(counted_NS, response_NS) else counted_NS,
        )
        share_K = facts["share_K"] or ()
        if not all(f"slope_logprob_{k}" in rows for k in range(len(share_K))):
            share_K = ()
        ends = [f"_{k}" for k in range(len(share_K))] or [""]
        table = cls(
            batch=batch,
            objective=Objective(**facts["objective"]),
            scores=Scores(spread("logprob"), spread("entropy")),
            slope_K=Scores(
                torch.stack([spread(f"slope_logprob{end}") for end in ends]),
                torch.stack([spread(f"slope_entropy{end}") for end in ends]),
            ),
            lr=facts["lr"],
            clip_factor=facts["clip_factor"],
            baseline=dict(facts["baseline"]),
            share_K=torch.tensor(share_K, dtype=torch.float64) if share_K else None,
            baseline_K=_baseline(facts, len(share_K)),
        )
        _check_objective(
            table, Scores(spread("coefficient_logprob"), spread("coefficient_entropy"))
        )
        return table


StepTable = TokenInfluence | TokenTable
"""What `repredict` reads."""


def baseline_folds(table: StepTable) -> Tensor | None:
    """[K]: each fold's part of what momentum and decay do; None: not known."""
    if isinstance(table, TokenTable):
        return table.baseline_K
    if not table.baseline:
        return torch.zeros(table.folds, dtype=torch.float64)
    parts = [
        fold_K
        for parts in table.module_folds.values()
        for part, fold_K in parts.items()
        if part in table.baseline
    ]
    return torch.stack(parts).sum(0) if parts else None


def facts(table: StepTable) -> dict[str, Any]:
    """What a saved table needs beside its columns; plain JSON."""
    baseline_K = baseline_folds(table)
    return {
        "objective": asdict(table.objective),
        "lr": table.lr,
        "clip_factor": table.clip_factor,
        "baseline": dict(table.baseline),
        "baseline_K": None if baseline_K is None else baseline_K.tolist(),
        "tokens": int(table.batch.rollouts.response_NS.sum()),
        "share_K": None if table.share_K is None else table.share_K.tolist(),
    }


def fold_columns(table: StepTable) -> dict[str, Any]:
    """Slopes by fold, in token_rows' order: with them a saved table still has standard errors."""
    response_NS = table.batch.rollouts.response_NS
    return {
        f"slope_{name}_{k}": x_NS[response_NS].cpu().numpy()
        for name, x_KNS in zip(("logprob", "entropy"), table.slope_K, strict=True)
        for k, x_NS in enumerate(x_KNS)
    }


def _baseline(facts: Mapping[str, Any], folds: int) -> Tensor | None:
    """By fold; a table saved before these were has no standard error that needs them."""
    if not folds:  # the slopes are not there by fold either
        return torch.tensor([sum(facts["baseline"].values())], dtype=torch.float64)
    found = facts.get("baseline_K")
    if found is None:
        return None if facts["baseline"] else torch.zeros(folds, dtype=torch.float64)
    return torch.tensor(found, dtype=torch.float64)


def _column(rows: Rows, name: str, dtype: torch.dtype) -> Tensor:
    nothing = float("nan")  # how a file's null is read
    return torch.tensor([nothing if value is None else value for value in rows[name]], dtype=dtype)


def _attention(response_NS: Tensor) -> Tensor:
    """One unbroken run, from the token before the response to the response's end."""
    begun_NS = torch.nn.functional.pad(response_NS[:, 1:], (0, 1)).cumsum(1) > 0
    open_NS = response_NS.flip(1).cumsum(1).flip(1) > 0
    return (begun_NS | response_NS) & open_NS


def _check_rows(rows: Rows, facts: Mapping[str, Any]) -> None:
    missing = sorted(set(NEEDED) - set(rows))
    if missing:
        raise ValueError(
            f"The token table lacks the columns {missing}; expected those of token_rows. Write it "
            "again with this version."
        )
    if len(rows["rollout"]) != facts["tokens"]:
        raise ValueError(
            f"The token table has {len(rows['rollout'])} rows; expected {facts['tokens']}, one per "
            "response token. Give the whole table: a what-if selects tokens itself."
        )


def _check_objective(table: TokenTable, recorded: Scores) -> None:
    """The loss in `facts` must be the one whose coefficients the table holds."""
    again = token_coefficients(table.objective, table.scores, table.batch)
    gap = max(float((a - b).abs().max()) for a, b in zip(again, recorded, strict=True))
    size = max(float(x_NS.abs().max()) for x_NS in recorded)
    if gap > SAME * size:
        raise ValueError(
            f"The table's coefficients differ by {gap:.3g} (largest {size:.3g}) from those of "
            f"{table.objective}; expected the same. These facts belong to another table."
        )
