"""Expected reward as a ratio of two sums, as `ratio` has it for entropy: A_i = W_i R_i, B_i = W_i.

    R = sum_i w_i A_i / sum_i w_i B_i,    W_i = exp(S_i - S_i as drawn)

Here are the per-rollout sums of each estimate in `reward`, and the functions of their means.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from entropy_experiments.distributed import current
from entropy_experiments.estimate.modes import cut_over_ranks
from entropy_experiments.estimate.ratio import check_scores, drawn_with
from entropy_experiments.estimate.stencil import COLUMNS, stencil_columns
from entropy_experiments.numerics.derivatives import How, difference_step, pushforward
from entropy_experiments.numerics.second_order import SecondOrder, pushforward2
from entropy_experiments.numerics.weights import snis_logweights
from entropy_experiments.types import Params, Policy, Rollouts, Scores


def rollout_slopes(
    policy: Policy, rollouts: Rollouts, v: Params, mode: How, microbatch: int, lr: float
) -> tuple[Tensor, Tensor]:
    """Per rollout: the log-weight at theta (0 if fresh) and D_v S; `lr` away by differences."""
    step = difference_step(policy.params, v, lr) if mode == "central" else None

    def sums(rows_N: Tensor, columns: slice, part: Rollouts) -> Tensor:
        scores, slope = pushforward(
            lambda p: policy.score(p, part), policy.params, v, how=mode, step=step
        )
        check_scores(scores, part, rows_N, columns)
        logweight_N = logweights(scores, drawn_with(scores, part), part)
        slope_N = torch.where(part.response_NS, slope.logprob_NS.double(), 0.0).sum(1)
        return torch.stack([logweight_N, slope_N], dim=1)

    found_NM = _by_microbatch(policy, sums, rollouts, 2, microbatch)
    return found_NM[:, 0], found_NM[:, 1]


def second_order_sums(
    policy: Policy,
    rollouts: Rollouts,
    reward_N: Tensor,
    v: Params,
    mode: How,
    microbatch: int,
    step: float,
) -> Tensor:
    """Per rollout: the columns of `estimate.stencil` of A = W R, B = W."""

    def sums(rows_N: Tensor, columns: slice, part: Rollouts) -> Tensor:
        derivatives = pushforward2(
            lambda p: policy.score(p, part), policy.params, v, how=mode, step=step
        )
        check_scores(derivatives.value, part, rows_N, columns)
        start_N = logweights(derivatives.value, drawn_with(derivatives.value, part), part)
        by_rollout = SecondOrder(
            start_N,
            *(
                torch.where(part.response_NS, x.logprob_NS.double(), 0.0).sum(1)
                for x in derivatives[1:]
            ),
        )

        return stencil_columns(lambda bent_N: weighted(reward_N[rows_N], bent_N), by_rollout)

    return _by_microbatch(policy, sums, rollouts, COLUMNS, microbatch)


def _by_microbatch(
    policy: Policy,
    sums: Callable[[Tensor, slice, Rollouts], Tensor],
    rollouts: Rollouts,
    width: int,
    size: int,
) -> Tensor:
    """[N, width] sums per rollout, dealt out to the current ranks."""
    ranks = current()
    # Where ranks need not pass together: by length alone, without regard to shared prompts.
    lockstep = policy if cut_over_ranks(policy) else None

    def local() -> list[Tensor]:
        out_NM = rollouts.weight_N.new_zeros(len(rollouts), width)
        for rows_N, columns, part in ranks.shard(rollouts.split(size, lockstep)):
            # An idle part is some rollout, with the reward of the first: it fills no row.
            at_N = rows_N if len(rows_N) else rows_N.new_zeros(1)
            out_NM[rows_N] = sums(at_N, columns, part)
        return [out_NM]

    return ranks.all_reduce(local)[0]


def logweights_here(base: Scores | None, rollouts: Rollouts) -> Tensor:
    """At theta itself: 0 for fresh rollouts, for which there is no `base`."""
    if base is None:
        return torch.zeros_like(rollouts.weight_N)
    return logweights(base, drawn_with(base, rollouts), rollouts)


def logweights(scores: Scores, drawn_NS: Tensor, rollouts: Rollouts) -> Tensor:
    logratio_NS = scores.logprob_NS.double() - drawn_NS.double()
    return snis_logweights(torch.where(rollouts.response_NS, logratio_NS, 0.0))


def weighted(
    reward_N: Tensor, logweight_N: Tensor, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    weight_N = (logweight_N if clip is None else logweight_N.clamp(-clip, clip)).exp()
    return weight_N * reward_N, weight_N


def matched(reward_N: Tensor, logweight_N: Tensor, slope_N: Tensor, rollouts: Rollouts) -> Tensor:
    """A, B, A', B'."""
    top_N, bottom_N = weighted(reward_N, logweight_N)
    return torch.stack([top_N, bottom_N, top_N * slope_N, bottom_N * slope_N], 1)


def covariances(
    reward_N: Tensor, logweight_N: Tensor, slope_N: Tensor, rollouts: Rollouts
) -> Tensor:
    """Products whose weighted mean is the covariance within prompts, and the weights.

    Both factors are centred: the sum is the same as with one, and each rollout's share is then
    its influence on the covariance, which a fixed set of prompts needs.
    """
    ratio_N = logweight_N.exp()
    weight_N = rollouts.weight_N * ratio_N
    _, index_N = torch.unique(rollouts.prompt_N, return_inverse=True)
    zeros_P = weight_N.new_zeros(int(index_N.max()) + 1)

    def total(x_N: Tensor) -> Tensor:
        return zeros_P.index_add(0, index_N, x_N)[index_N]

    # A prompt of weight 0 takes no part.
    share_N = weight_N / total(weight_N).clamp_min(torch.finfo(weight_N.dtype).tiny)
    centred = (x_N - total(share_N * x_N) for x_N in (reward_N, slope_N))
    product_N = next(centred) * next(centred)
    # sum of squared shares is 1/n for n equal weights: this is the n / (n - 1).
    return torch.stack([ratio_N * product_N / (1 - total(share_N**2)), ratio_N], 1)


def level_of(top: Tensor, bottom: Tensor) -> Tensor:
    return top / bottom


def slope_of(a: Tensor, b: Tensor, da: Tensor, db: Tensor) -> Tensor:
    return (da - a / b * db) / b


def change_of(new_top: Tensor, new: Tensor, old_top: Tensor, old: Tensor) -> Tensor:
    return new_top / new - old_top / old
