"""Folds of the evaluation prompts: how much of an influence is the sample's doing.

Fold k gives g_H^(k), its share of g_H with the level H and the normaliser of *all* of E, so that
folds add up. With s_k the fold's part of the normaliser, d_k / s_k is the fold's own estimate of
d = sum_k d_k, and

    stderr^2 = sum_k (d_k - s_k d)^2 / s_k / (K - 1)

which is K / (K-1) sum_k (d_k - d/K)^2 for equal folds. The uncertainty of H itself is left out.
For a fixed set of prompts this overstates the error: it has the spread between prompts in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from entropy_experiments.numerics.derivatives import GradientSum, as_gradients
from entropy_experiments.types import Params, Rollouts


def prompt_folds(rollouts: Rollouts, folds: int) -> Tensor:
    """[N]: prompts dealt to folds in order of first appearance."""
    order = dict.fromkeys(rollouts.prompt_N.tolist())
    if not 1 <= folds <= len(order):
        raise ValueError(
            f"folds is {folds}; expected between 1 and {len(order)}, the number of evaluation "
            "prompts: each fold needs a prompt of its own. 2 folds give a standard error."
        )
    index = {prompt: i % folds for i, prompt in enumerate(order)}
    fold_N = [index[prompt] for prompt in rollouts.prompt_N.tolist()]
    return torch.tensor(fold_N, device=rollouts.prompt_N.device)


def fold_stderr(fold_K: Tensor, share_K: Tensor | None) -> Tensor:
    """Standard error of the sum over the first axis; NaN with a single fold."""
    count = len(fold_K)
    if count == 1:
        return torch.full_like(fold_K[0], torch.nan)
    if share_K is None:
        share_K = fold_K.new_full((count,), 1 / count)
    share_K = share_K.to(fold_K).reshape(-1, *[1] * (fold_K.dim() - 1))
    return ((fold_K - share_K * fold_K.sum(0)) ** 2 / share_K).sum(0).div(count - 1).sqrt()


def same_sign(fold_K: Tensor) -> Tensor:
    """Where all folds (two or more) agree on the sign, and none is zero."""
    if len(fold_K) == 1:
        return torch.zeros_like(fold_K[0], dtype=torch.bool)
    return (fold_K > 0).all(0) | (fold_K < 0).all(0)


def split_half(fold_KT: Tensor) -> float | None:
    """Correlation of the first half of the folds with the second, by Spearman and Brown.

    2 r / (1 + r) is what all folds together would correlate with as many new ones. The correction
    has no meaning for r <= 0, which is given as it is. None: one fold, fewer than three entries,
    or no spread.
    """
    count, entries = fold_KT.shape
    if count < 2 or entries < 3:
        return None
    halves = torch.stack([fold_KT[: count // 2].sum(0), fold_KT[count // 2 :].sum(0)])
    halves = halves - halves.mean(1, keepdim=True)
    spread = float(halves[0].norm() * halves[1].norm())
    if spread == 0:
        return None
    r = float((halves[0] * halves[1]).sum()) / spread
    return 2 * r / (1 + r) if r > 0 else r


class FoldGradients:
    """g_H^(k) = sum over fold k of w_i (grad A_i - H grad B_i) / B."""

    def __init__(self, params: Params, fold_N: Tensor, share_N: Tensor, level: Tensor) -> None:
        if fold_N.shape != share_N.shape or int(fold_N.min()) < 0:
            raise ValueError(
                f"fold_N has shape {tuple(fold_N.shape)} and minimum {int(fold_N.min())}; expected "
                f"a fold 0, 1, ... for each of the {len(share_N)} evaluation rollouts."
            )
        self.fold_N, self.share_N, self.level = fold_N, share_N, float(level)
        self._params = params
        self._gradients = [GradientSum(params) for _ in range(int(fold_N.max()) + 1)]

    def add(self, rows_N: Tensor, found: Sequence[Mapping[str, Tensor]]) -> None:
        for k, into in enumerate(self._gradients):
            share_N = torch.where(self.fold_N[rows_N] == k, self.share_N[rows_N], 0.0)
            for factor, gradients in zip((1.0, -self.level), found):
                into.add(
                    {
                        name: torch.tensordot((factor * share_N).to(g), g, dims=1)
                        for name, g in gradients.items()
                    }
                )

    @property
    def sums(self) -> list[Tensor]:
        return [total for one in self._gradients for total in one.sums]

    def rounded(self, sums: Iterable[Tensor]) -> tuple[dict[str, Tensor], ...]:
        """g_H by fold, of the sums of all ranks."""
        rest = iter(sums)
        each = len(self._params)
        return tuple(as_gradients(islice(rest, each), self._params) for _ in self._gradients)
