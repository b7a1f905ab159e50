"""A checkpoint's rollouts as rows of its parquet file, and what the rows say.

Every measure is a function of the rows alone. So a resumed evaluation says what an undisturbed one
says, and whoever has the file can make the numbers again. Rows of a prompt stand side by side,
`samples` of each.

On a policy's own responses E[surprisal] = E[entropy]: each token's expected surprisal is the
entropy of the distribution it was drawn from. So `surprisal_minus_entropy` is 0 but for chance;
anything else says that the distribution sampled is not the one that is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.estimate.shares import (
    honest,
    pass_at_k,
    ratio_by_prompt,
    share_by_prompt,
)
from entropy_experiments.pipelines.probe_sampling import response_ids
from entropy_experiments.results import HighEntropyToken
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.rewards import Reward, build_reward, final_answer
from entropy_experiments.types import Estimand, Estimate, Rollouts, Scores
from entropy_experiments.types.rollouts import FULL_REWARD

PASS = FULL_REWARD
"""What every reward function must give for a response to pass."""
LEAST_COUNT = 5
"""Draws of a token below which its mean entropy is anecdote."""
TOP_TOKENS = 20
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
Rows = Mapping[str, Sequence[Any]]


def rollout_rows(
    rollouts: Rollouts,
    scores: Scores,
    problems: Sequence[Problem],
    reward: Reward,
    *,
    samples: int,
    threshold: float,
) -> dict[str, list[Any]]:
    """A row per rollout, those of a prompt side by side; entropies in nats."""
    each = [problem for problem in problems for _ in range(samples)]
    texts = list(rollouts.text or ())
    earned = reward(texts, each, completion_ids=response_ids(rollouts)).by_function
    passed_N = torch.stack(list(earned.values())).nan_to_num(PASS).amin(0) >= PASS
    response_NS = rollouts.response_NS
    entropy_NS = torch.where(response_NS, scores.entropy_NS.double(), 0.0)
    surprisal_NS = torch.where(response_NS, -scores.logprob_NS.double(), 0.0)
    return {
        "prompt": rollouts.prompt_N.tolist(),
        "problem": [problem.id for problem in each],
        "sample": [i for _ in problems for i in range(samples)],
        "passed": passed_N.tolist(),
        **{f"reward:{name}": _without_nan(value_N) for name, value_N in earned.items()},
        "well_formed": [bool(x) for x in _format(texts, each)],
        "answered": [bool(final_answer(t, problem)) for t, problem in zip(texts, each)],
        "tokens": rollouts.tokens_N.tolist(),
        "truncated": rollouts.truncated_N.tolist(),
        "entropy_sum": entropy_NS.sum(1).tolist(),
        "surprisal_sum": surprisal_NS.sum(1).tolist(),
        "above_threshold": (response_NS & (entropy_NS > threshold)).sum(1).tolist(),
        "prompt_text": [problem.prompt for problem in each],
        "response": texts,
    }


def _without_nan(value_N: torch.Tensor) -> list[float | None]:
    """None where the function had no opinion."""
    return [None if value != value else value for value in value_N.tolist()]


def _format(texts: list[str], problems: list[Problem]) -> list[float]:
    return build_reward(["format"])(texts, problems).total_N.tolist()


def high_entropy_tokens(
    rollouts: Rollouts, scores: Scores, decode: Callable[[list[int]], str]
) -> list[HighEntropyToken]:
    """Tokens drawn where the policy was least sure, by the mean entropy of their distributions.

    `share_of_entropy`: how much of the entropy of all responses their draws hold.
    """
    response_NS = rollouts.response_NS
    token_T = rollouts.tokens_NS[response_NS]
    entropy_T = scores.entropy_NS[response_NS].double()
    tokens, index_T, count = torch.unique(token_T, return_inverse=True, return_counts=True)
    total = torch.zeros(len(tokens), dtype=torch.float64).index_add(0, index_T, entropy_T)
    whole = float(entropy_T.sum())
    means = [
        (-h / n, i, n, h)
        for i, n, h in zip(tokens.tolist(), count.tolist(), total.tolist())
        if n >= LEAST_COUNT
    ]
    return [
        {
            "token": decode([i]),
            "id": i,
            "count": n,
            "mean_entropy": h / n,
            "share_of_entropy": h / whole if whole else 0,
        }
        for _, i, n, h in sorted(means)[:TOP_TOKENS]
    ]


def check_reward(reward: Reward, problems: Sequence[Problem]) -> None:
    """Ask for the reward of a wrong answer to every problem: what cannot be judged fails now.

    Not of functions of one's own: they may cost, and read tokens that there are not yet.
    """
    if reward.own:
        return
    reward(["<answer>0</answer>"] * len(problems), list(problems))


def measures(
    rows: Rows, *, samples: int, ks: Sequence[int], sampled: Estimand
) -> dict[str, Estimate]:
    """Estimates by name. `sampled`: temperature, top_p and horizon of the responses."""
    of_rollouts = replace(sampled, quantity="reward", unit="sequence")
    of_tokens = replace(sampled, unit="token")

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
