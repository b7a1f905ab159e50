"""The training batch as its own evaluation set: a U-statistic across prompts.

A step judged on the rollouts that made it looks better than it is: each rollout's gradient raises
its own score most. With s_i(v) the slope that prompt i sees along v, and v_j prompt j's share of
the step's gradient part,

    in sample      sum_i sum_j s_i(v_j)
    across         n / (n - 1) sum_i sum_{j != i} s_i(v_j)

The second is unbiased for what is linear in the loss gradient (the optimizer's denominator is
shared by all). What prompts see of their *own* share, s_i(v_i), costs a backward over the batch,
prompt by prompt, and one forward-mode pass in which each prompt has a direction of its own.
Momentum and decay were there before the batch and need no correction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from entropy_experiments.distributed import Ranks, current
from entropy_experiments.estimate.ratio import no_scores
from entropy_experiments.numerics.derivatives import (
    GradientSum,
    How,
    dot,
    norm,
    pullback_sum,
    pushforward,
)
from entropy_experiments.types import Direction, Params, Policy, Scores, UpdateBatch
from entropy_experiments.update.gradient import as_trained
from entropy_experiments.update.objective import Objective, TokenWeights

MISMATCH = 0.02
"""Of the gradient's norm: bf16 training is within it, another loss is not."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnBatch:
    """What a step learns from, when it is also to be judged by it."""

    batch: UpdateBatch
    objective: Objective

    def __post_init__(self) -> None:
        if self.prompts < 2:
            raise ValueError(
                "The batch has one prompt; expected at least 2: pairs of different prompts are "
                "all that an own-batch estimate is made of."
            )

    @property
    def prompts(self) -> int:
        return len(self.batch.rollouts.prompt_N.unique())

    def across(self, gradient: Scores, own: Scores) -> Scores:
        """The slopes of the gradient part that other prompts' shares make, at full size."""
        grow = self.prompts / (self.prompts - 1)
        return Scores(*(grow * (g_NS - o_NS) for g_NS, o_NS in zip(gradient, own, strict=True)))


def own_slopes(
    policy: Policy,
    own: OwnBatch,
    direction: Direction,
    gradient: Params,
    *,
    mode: How,
    microbatch: int = 8,
    ranks: Ranks | None = None,
) -> Scores:
    """Slopes of every rollout's scores along its own prompt's share of the gradient part.

    `gradient` is the one that `direction` was built with (clipped, as the optimizer sees it); the
    loss that is rebuilt here must give it up to one factor, or the shares would be another step's.
    `ranks`: None are the current ones.
    """
    ranks = ranks or current()
    if mode == "central":
        raise ValueError(
            "A step judged by its own batch (evaluation='batch') on a model that has neither "
            "forward mode nor a double backward: differences cannot tell a prompt's own share from "
            "the rest. Use evaluation='fresh' or 'half'."
        )
    if direction.preconditioner is None:
        raise ValueError(
            "The direction has no preconditioner; expected one rebuilt from an optimizer "
            "(update.live.live_direction): an observed step does not say what the gradient did."
        )
    p, params, trained = direction.preconditioner, policy.params, as_trained(policy)
    weights = own.objective.token_weights(own.batch)
    prompts = own.batch.rollouts.prompt_N.unique().tolist()
    names = list(params)

    def local() -> list[Tensor]:
        out = no_scores(own.batch.rollouts)
        total = GradientSum(params)
        for prompt in ranks.shard(prompts):
            rows_N = (own.batch.rollouts.prompt_N == prompt).nonzero()[:, 0]
            parts = list(own.batch.rollouts.take(rows_N).split(microbatch))
            share = pullback_sum(
                (_loss_of(trained, own, weights, rows_N[rows], cut) for rows, cut, _ in parts),
                params,
            )[1]
            v = {name: -p[name] * share[name] for name in names}
            total.add(share)
            for rows, columns, part in parts:
                _, slope = pushforward(lambda x: policy.score(x, part), params, v, how=mode)
                for whole_NS, x_NS in zip(out, slope, strict=True):
                    whole_NS[rows_N[rows], columns] = x_NS.double()
        return [*out, *total.sums]

    logprob_NS, entropy_NS, *sums = ranks.all_reduce(local)
    rebuilt = dict(zip(names, sums, strict=True))
    factor = _factor(gradient, rebuilt)
    return Scores(factor * logprob_NS, factor * entropy_NS)


def _loss_of(
    policy: Policy, own: OwnBatch, weights: TokenWeights, rows_N: Tensor, columns: slice
) -> Callable[[Params], Tensor]:
    part, part_weights = own.batch.take(rows_N, columns), weights.take(rows_N, columns)

    def loss(params: Params) -> Tensor:
        scores = policy.score(params, part.rollouts)
        return own.objective.weighted(scores, part, part_weights)

    return loss


def _factor(gradient: Params, rebuilt: Params) -> float:
    """c in gradient = c * rebuilt: what clipping did."""
    size = dot(rebuilt, rebuilt)
    factor = dot(gradient, rebuilt) / size if size else 0.0
    rest = {name: gradient[name].double() - factor * g.double() for name, g in rebuilt.items()}
    whole = norm(gradient)
    missed = norm(rest) / whole if whole else 0.0
    if missed > MISMATCH:
        raise ValueError(
            f"The rebuilt loss gradient differs from the trainer's by {missed:.1%}; expected at "
            f"most {MISMATCH:.0%}. The objective, the batch or the microbatches are not those of "
            "this step: use another evaluation set ('fresh')."
        )
    return factor
