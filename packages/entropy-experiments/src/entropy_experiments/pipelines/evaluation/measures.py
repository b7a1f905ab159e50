"""What a checkpoint's rollouts say, from one row per rollout: the columns of its parquet file.

Every measure is a function of the rows alone. So a resumed evaluation says what an undisturbed one
says, and whoever has the file can make the numbers again. Rows of a prompt stand side by side,
`samples` of each.

On a policy's own responses E[surprisal] = E[entropy]: each token's expected surprisal is the
entropy of the distribution it was drawn from. So `surprisal_minus_entropy` is 0 but for chance;
anything else says that the distribution sampled is not the one that is scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.estimate.shares import (
    honest,
    pass_at_k,
    ratio_by_prompt,
    share_by_prompt,
)
from entropy_experiments.types import Estimand, Estimate

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
Rows = Mapping[str, Sequence[Any]]


def measures(
    rows: Rows, *, samples: int, ks: Sequence[int], sampled: Mapping[str, Any]
) -> dict[str, Estimate]:
    """Estimates by name. `sampled`: temperature, top_p and horizon of what was sampled."""
    of_rollouts = Estimand(quantity="reward", unit="sequence", **sampled)
    of_tokens = Estimand(unit="token", **sampled)

    def by_prompt(name: str) -> Tensor:
        return torch.tensor(rows[name], dtype=torch.float64).view(-1, samples).sum(1)

    tokens_P, passed_P = by_prompt("tokens"), by_prompt("passed")
    entropy_P, surprisal_P = by_prompt("entropy_sum"), by_prompt("surprisal_sum")
    count = float(len(rows["tokens"]))

    def share(total_P: Tensor) -> Estimate:
        return share_by_prompt(total_P / samples, of_rollouts, trials=count)

    passes = [round(c) for c in passed_P.tolist()]
    return {
        "pass_rate": share(passed_P),
        **{
            f"pass@{k}": share_by_prompt(
                pass_at_k(passes, samples, k), of_rollouts, trials=count / k
            )
            for k in ks
        },
        **_rewards(rows, samples, of_rollouts),
        "format_rate": share(by_prompt("well_formed")),
        "answered": share(by_prompt("answered")),
        "length": ratio_by_prompt(tokens_P, torch.full_like(tokens_P, samples), of_rollouts),
        "truncated": share(by_prompt("truncated")),
        "entropy": ratio_by_prompt(entropy_P, tokens_P, of_tokens),
        "surprisal": ratio_by_prompt(surprisal_P, tokens_P, of_tokens),
        "surprisal_minus_entropy": ratio_by_prompt(surprisal_P - entropy_P, tokens_P, of_tokens),
        "high_entropy_share": ratio_by_prompt(by_prompt("above_threshold"), tokens_P, of_tokens),
    }


def _rewards(rows: Rows, samples: int, estimand: Estimand) -> dict[str, Estimate]:
    """Mean of each reward function that is no pass or fail; None: it had no opinion."""
    estimates = {}
    for name in (column for column in rows if column.startswith("reward:")):
        values = list(rows[name])
        if all(value in (0, 1) for value in values):
            continue
        value_N = torch.tensor([0.0 if v is None else v for v in values], dtype=torch.float64)
        scored_N = torch.tensor([v is not None for v in values], dtype=torch.float64)
        value_P, scored_P = (x_N.view(-1, samples).sum(1) for x_N in (value_N, scored_N))
        estimates[name] = ratio_by_prompt(value_P, scored_P, estimand)
    return estimates


def differences(
    found: Mapping[str, Estimate], first: Mapping[str, Estimate]
) -> dict[str, Estimate]:
    """Each measure minus the first checkpoint's, paired by prompt.

    A reward that was graded in one and all 0s and 1s in the other has no mean to subtract.
    """
    return {name: honest(found[name] - first[name]) for name in found if name in first}


def length_quantiles(rows: Rows) -> dict[str, float]:
    tokens_N = torch.tensor(rows["tokens"], dtype=torch.float64)
    at = torch.tensor(QUANTILES, dtype=torch.float64)
    return {f"{q:g}": x for q, x in zip(QUANTILES, torch.quantile(tokens_N, at).tolist())}
