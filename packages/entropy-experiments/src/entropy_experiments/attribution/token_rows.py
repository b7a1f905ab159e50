"""One row per response token of the update batch: what tokens.parquet holds.

Columns are what the step recorded and what `attribution.tokens` made of it; each function of
`attribution.proxies` adds one. `table_version` changes with them.

Numbers that do not exist are NaN: reward, old_logprob or ref_logprob that nobody recorded, and the
stderr of a single fold. `microbatch` is then -1, `text` empty and `uid` None. Rows are in order of
rollout and position; tokens that the loss does not count have `counted` False, and influence and
proxies 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.artifacts import digest_of
from entropy_experiments.attribution import proxies
from entropy_experiments.attribution.tokens import TokenInfluence
from entropy_experiments.types import Scores, UpdateBatch

COLUMNS_VERSION = 2
"""Raise it when a column other than a proxy comes, goes or changes."""


def token_rows(
    influence: TokenInfluence, decode: Callable[[list[int]], str] | None = None
) -> dict[str, Any]:
    """Columns of equal length: numpy arrays; `uid` and `text` are lists."""
    batch, rollouts = influence.batch, influence.batch.rollouts
    where = rollouts.response_NS.nonzero(as_tuple=True)
    rows_T, columns_T = where
    slope_l_NS, slope_h_NS = (slope_KNS.sum(0) for slope_KNS in influence.slope_K)
    missing_NS = torch.full(rollouts.tokens_NS.shape, torch.nan, dtype=torch.float64)

    def per_token(x_NS: Tensor | None) -> Tensor:
        return (missing_NS if x_NS is None else x_NS.double())[where]

    def per_rollout(x_N: Tensor | None, absent: float) -> Tensor:
        return torch.full(rows_T.shape, absent) if x_N is None else x_N[rows_T]

    token_T = rollouts.tokens_NS[where]
    logprob_T = per_token(influence.scores.logprob_NS)
    columns = {
        "rollout": rows_T,
        "prompt": rollouts.prompt_N[rows_T],
        "position": columns_T,
        "k": response_index(batch)[where],
        "token_id": token_T,
        "logprob": logprob_T,
        "probability": logprob_T.exp(),
        "entropy": per_token(influence.scores.entropy_NS),
        "advantage": per_token(batch.advantage_NS),
        "reward": per_rollout(batch.reward_N, torch.nan).double(),
        "old_logprob": per_token(batch.old_logprob_NS),
        "ref_logprob": per_token(batch.ref_logprob_NS),
        "weight": rollouts.weight_N[rows_T],
        "microbatch": per_rollout(batch.microbatch_N, -1).long(),
        "coefficient_logprob": per_token(influence.coefficient.logprob_NS),
        "coefficient_entropy": per_token(influence.coefficient.entropy_NS),
        "slope_logprob": per_token(slope_l_NS),
        "slope_entropy": per_token(slope_h_NS),
        "influence": per_token(influence.value_NS),
        "stderr": per_token(influence.stderr_NS),
        "stable": influence.stable_NS[where],
        "counted": influence.counted_NS[where],
        **{f"fold_{k}": per_token(fold_NS) for k, fold_NS in enumerate(influence.fold_KNS)},
        **{name: per_token(x_NS) for name, x_NS in proxy_columns(batch, influence.scores).items()},
    }
    rows: dict[str, Any] = {name: x_T.cpu().numpy() for name, x_T in columns.items()}
    text = [decode([token]) if decode is not None else "" for token in token_T.tolist()]
    uid = [None if rollouts.uid is None else rollouts.uid[row] for row in rows_T.tolist()]
    return {**rows, "uid": uid, "text": text}


def proxy_columns(batch: UpdateBatch, scores: Scores) -> dict[str, Tensor]:
    """[N, S] of every proxy; 0 where the loss does not count, as influence is."""
    return {
        f"proxy_{proxy.__name__}": torch.where(batch.counted_NS, proxy(batch, scores).double(), 0.0)
        for proxy in proxies.PROXIES
    }


def table_version() -> str:
    """What the columns are computed by: a finished study with another table is written again.

    The text of the proxies is part of it, so that no number of a formula has to be raised by hand.
    """
    names = [proxy.__name__ for proxy in proxies.PROXIES]
    return digest_of(COLUMNS_VERSION, names, inspect.getsource(proxies))


def response_index(batch: UpdateBatch) -> Tensor:
    """[N, S]: how many response tokens come before; tool output in between does not count."""
    return batch.rollouts.response_NS.long().cumsum(1) - batch.rollouts.response_NS.long()
