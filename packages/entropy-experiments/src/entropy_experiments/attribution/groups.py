"""Influences added up by what tokens have in common, and the tokens that matter most.

Groups of one kind are disjoint and cover every counted token, so each kind sums to the same total:
what the update batch did. Standard errors come from the folds of E's prompts, summed per group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import isnan
from typing import Literal, get_args

import torch
from torch import Tensor

from entropy_experiments.attribution.folds import fold_stderr, same_sign
from entropy_experiments.attribution.token_rows import response_index
from entropy_experiments.attribution.tokens import TokenInfluence

By = Literal[
    "advantage_probability", "prompt", "position", "correctness", "rollout", "module", "layer"
]
Most = Literal["destroying", "creating", "absolute"]

PROBABILITY_EDGES = (0.0, 0.1, 0.5, 0.9, 1.0)
POSITION_BINS = 10


@dataclass(frozen=True, kw_only=True)
class GroupInfluence:
    value: float
    """Nats of the step."""
    stderr: float | None
    """None with a single fold."""
    tokens: int
    """Counted tokens; those of a module are all of them."""
    stable: bool
    """Every fold sees the same sign."""


@dataclass(frozen=True, kw_only=True)
class RankedToken:
    rollout: int
    position: int
    """Column of tokens_NS."""
    k: int
    """Index in the response."""
    token: int
    prompt: int
    value: float
    stderr: float
    probability: float
    entropy: float
    advantage: float


def grouped(influence: TokenInfluence, by: By) -> dict[str, GroupInfluence]:
    """Groups in their natural order; those without a counted token are left out."""
    if by not in get_args(By):
        raise ValueError(f"by={by!r}; expected one of {get_args(By)}.")
    if by in ("module", "layer"):
        return _by_parameters(influence, module_of if by == "module" else layer_of)
    label_NS, names = _LABELS[by](influence)
    counted_NS, fold_KNS = influence.counted_NS, influence.fold_KNS
    out: dict[str, GroupInfluence] = {}
    for label, name in enumerate(names):
        mask_NS = counted_NS & (label_NS == label)
        tokens = int(mask_NS.sum())
        if tokens:
            out[name] = _group(influence, fold_KNS[:, mask_NS].sum(1), tokens)
    return out


def ranked(
    influence: TokenInfluence, count: int, *, most: Most = "destroying"
) -> list[RankedToken]:
    """The tokens that moved the entropy most, of those on whose sign all folds agree."""
    if most not in get_args(Most):
        raise ValueError(f"most={most!r}; expected one of {get_args(Most)}.")
    if count < 1:
        raise ValueError(f"count is {count}; expected at least 1.")
    value_NS, stderr_NS, scores = influence.value_NS, influence.stderr_NS, influence.scores
    weight_NS = {"destroying": -value_NS, "creating": value_NS, "absolute": value_NS.abs()}[most]
    rows_T, columns_T = (influence.stable_NS & (weight_NS > 0)).nonzero(as_tuple=True)
    order_T = weight_NS[rows_T, columns_T].argsort(descending=True, stable=True)[:count]
    k_NS, rollouts = response_index(influence.batch), influence.batch.rollouts
    return [
        RankedToken(
            rollout=i,
            position=s,
            k=int(k_NS[i, s]),
            token=int(rollouts.tokens_NS[i, s]),
            prompt=int(rollouts.prompt_N[i]),
            value=float(value_NS[i, s]),
            stderr=float(stderr_NS[i, s]),
            probability=float(scores.logprob_NS[i, s].exp()),
            entropy=float(scores.entropy_NS[i, s]),
            advantage=float(influence.batch.advantage_NS[i, s]),
        )
        for i, s in zip(rows_T[order_T].tolist(), columns_T[order_T].tolist(), strict=True)
    ]


def _group(influence: TokenInfluence, fold_K: Tensor, tokens: int) -> GroupInfluence:
    stderr = float(fold_stderr(fold_K, influence.share_K))
    return GroupInfluence(
        value=float(fold_K.sum()),
        stderr=None if isnan(stderr) else stderr,
        tokens=tokens,
        stable=bool(same_sign(fold_K)),
    )


def _advantage_probability(influence: TokenInfluence) -> tuple[Tensor, list[str]]:
    sign_NS = influence.batch.advantage_NS.sign().long() + 1
    inner = torch.tensor(PROBABILITY_EDGES[1:-1], dtype=torch.float64).to(sign_NS.device)
    bin_NS = torch.bucketize(influence.scores.logprob_NS.exp(), inner, right=True)
    edges = list(pairwise(PROBABILITY_EDGES))
    names = [
        f"{sign}, p in [{low:g}, {high:g}{']' if high == 1 else ')'}"
        for sign in ("A < 0", "A = 0", "A > 0")
        for low, high in edges
    ]
    return sign_NS * len(edges) + bin_NS, names


def _prompt(influence: TokenInfluence) -> tuple[Tensor, list[str]]:
    prompt_N = influence.batch.rollouts.prompt_N
    prompt_P, index_N = torch.unique(prompt_N, return_inverse=True)
    return index_N[:, None], [str(prompt) for prompt in prompt_P.tolist()]


def _position(influence: TokenInfluence) -> tuple[Tensor, list[str]]:
    tokens_N1 = influence.batch.rollouts.tokens_N[:, None]
    bin_NS = (POSITION_BINS * response_index(influence.batch)) // tokens_N1
    width = 100 // POSITION_BINS
    return bin_NS, [f"{i * width}-{(i + 1) * width}%" for i in range(POSITION_BINS)]


BY_REWARD = ("lower rewards", "best reward of the batch")
"""Where no reward of the batch is a full one, so that which are correct is not known."""


def _correctness(influence: TokenInfluence) -> tuple[Tensor, list[str]]:
    correct_N, best_N = influence.batch.correct_N, influence.batch.best_N
    if best_N is None:
        raise ValueError(
            "by='correctness' needs rewards, and this update batch has reward_N = None. Record "
            "them, or group by 'advantage_probability'."
        )
    if correct_N is None:
        return best_N.long()[:, None], list(BY_REWARD)
    return correct_N.long()[:, None], ["incorrect", "correct"]


def _rollout(influence: TokenInfluence) -> tuple[Tensor, list[str]]:
    n = len(influence.batch.rollouts)
    index_N = torch.arange(n, device=influence.counted_NS.device)
    return index_N[:, None], [str(i) for i in range(n)]


_LABELS: dict[str, Callable[[TokenInfluence], tuple[Tensor, list[str]]]] = {
    "advantage_probability": _advantage_probability,
    "prompt": _prompt,
    "position": _position,
    "correctness": _correctness,
    "rollout": _rollout,
}


def _by_parameters(
    influence: TokenInfluence, name_of: Callable[[str], str]
) -> dict[str, GroupInfluence]:
    folds: dict[str, Tensor] = {}
    for name, parts in influence.module_folds.items():
        key = name_of(name)
        folds[key] = folds[key] + parts["gradient"] if key in folds else parts["gradient"]
    tokens = int(influence.counted_NS.sum())
    return {key: _group(influence, fold_K, tokens) for key, fold_K in folds.items()}


def module_of(name: str) -> str:
    """The layer that an adapter's or a layer's own parameter belongs to."""
    return name.split(".lora_")[0] if ".lora_" in name else name.rpartition(".")[0] or name


def layer_of(name: str) -> str:
    """Up to the first number: `model.layers.3`; parameters outside the stack by their module."""
    words = name.split(".")
    numbers = [i for i, word in enumerate(words) if word.isdigit()]
    return ".".join(words[: numbers[0] + 1]) if numbers else module_of(name)
