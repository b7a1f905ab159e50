"""A checkpoint's rollouts as rows of a table, and the tokens at which it was least sure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from entropy_experiments.pipelines.probe_sampling import response_ids
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.rewards import Reward, build_reward, final_answer
from entropy_experiments.types import Rollouts, Scores
from entropy_experiments.types.rollouts import FULL_REWARD

PASS = FULL_REWARD
"""What every reward function must give for a response to pass."""
LEAST_COUNT = 5
"""Draws of a token below which its mean entropy is anecdote."""
TOP_TOKENS = 20


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
) -> list[dict[str, Any]]:
    """Tokens drawn where the policy was least sure, by the mean entropy of their distributions.

    `share_of_entropy`: how much of the entropy of all responses their draws hold.
    """
    response_NS = rollouts.response_NS
    token_T = rollouts.tokens_NS[response_NS]
    entropy_T = scores.entropy_NS[response_NS].double()
    tokens, index_T, count = torch.unique(token_T, return_inverse=True, return_counts=True)
    total = torch.zeros(len(tokens), dtype=torch.float64).index_add(0, index_T, entropy_T)
    whole = float(entropy_T.sum())
    rows: list[Mapping[str, Any]] = [
        {"id": i, "count": n, "mean_entropy": h / n, "share_of_entropy": h / whole if whole else 0}
        for i, n, h in zip(tokens.tolist(), count.tolist(), total.tolist())
        if n >= LEAST_COUNT
    ]
    rows.sort(key=lambda row: (-row["mean_entropy"], row["id"]))
    return [{"token": decode([row["id"]]), **row} for row in rows[:TOP_TOKENS]]


def check_reward(reward: Reward, problems: Sequence[Problem]) -> None:
    """Ask for the reward of a wrong answer to every problem: what cannot be judged fails now.

    Not of functions of one's own: they may cost, and read tokens that there are not yet.
    """
    if reward.own:
        return
    reward(["<answer>0</answer>"] * len(problems), list(problems))
