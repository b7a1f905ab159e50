"""What every token of the update batch does to the entropy, by swapping the direction.

    u = P g_H        influence of token (i,k) = -lr c [ dL/dl_ik D_u l_ik + dL/dh_ik D_u h_ik ]

g_H . (-P c g_L) is symmetric in the two gradients: instead of one loss gradient per token, all
dotted with g_H, one derivative of the update batch's scores along u serves every token. In nats of
this step. P, the clip factor c, advantages and normalisers are those of the step as it was made:
a share of it, not what leaving the token out would change.

Fold k of E's prompts gives g_H^(k) and with it an influence of its own; see `attribution.folds` for
what is made of them.

    sum rule:   sum_ik influence = lr g_H . (gradient part of the step)

The left side is as exact as D_u is, the right side is reverse mode. Where D_u is a difference (a
model cut over ranks has nothing else), a sum that does not close is a doubt of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isnan

import torch
from torch import Tensor

from entropy_experiments.attribution.folds import (
    fold_stderr,
    prompt_folds,
    same_sign,
    split_half,
)
from entropy_experiments.attribution.jacobian import Differences, inside, score_slopes
from entropy_experiments.estimate.central import SHARE, SLACK
from entropy_experiments.estimate.gradient import entropy_coefficients, weighted_gradient
from entropy_experiments.estimate.modes import Mode, cut_over_ranks, used_forward_mode
from entropy_experiments.estimate.ratio import (
    check_estimand,
    check_repeatable,
    drawn_with,
    payload,
    ratio_sums,
    score_all,
    stale_reasons,
)
from entropy_experiments.numerics.derivatives import How, dots, norm, require_full_precision
from entropy_experiments.numerics.sums import whole
from entropy_experiments.types import (
    Direction,
    Estimand,
    Params,
    Policy,
    Rollouts,
    Scores,
    UpdateBatch,
    check_direction,
    check_params,
)
from entropy_experiments.types.direction import sum_of
from entropy_experiments.update.objective import Objective, token_coefficients

MAX_CANCELLATION = 20.0
"""Above this, parts are so much larger than their sum that a share of it means nothing."""
SUM_RULE = 0.01
"""Of the sum of |parts|: far above fp32 rounding, far below another batch's or loss's gradient."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenInfluence:
    """Influences are in nats of the step (learning rate included); slopes are per unit of u."""

    batch: UpdateBatch
    objective: Objective
    scores: Scores
    """Of the update rollouts at theta, as the loss sees them."""
    coefficient: Scores
    """dL/dl_ik and dL/dh_ik."""
    slope_K: Scores
    """[K, N, S] each: D l and D h along P g_H^(k)."""
    lr: float
    clip_factor: float
    estimand: Estimand
    baseline: Mapping[str, float]
    """Parts of the step that no token of this batch made: momentum and decay."""
    modules: Mapping[str, Mapping[str, float]] = field(repr=False)
    """By parameter name: what each part of the direction does through it."""
    g_H: Params = field(repr=False)
    module_folds: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict, repr=False)
    """The same as `modules`, [K] each."""
    share_K: Tensor | None = None
    """s_k of `attribution.folds`; None: equal folds."""
    differences: tuple[Differences, ...] = ()
    """By central: how the slopes of each fold were taken."""
    reach: float = 0.0
    """Length of the step: lr times the norm of its direction."""
    doubts: tuple[str, ...] = ()

    @property
    def folds(self) -> int:
        return self.slope_K.logprob_NS.shape[0]

    @property
    def fold_KNS(self) -> Tensor:
        """Add up to value_NS; divided by the fold's share, the fold's own estimate of it."""
        return folds_of_coefficients(self, self.coefficient)

    @property
    def value_NS(self) -> Tensor:
        """Zero wherever the loss does not count."""
        return of_coefficients(self, self.coefficient)

    @property
    def rollout_N(self) -> Tensor:
        return self.value_NS.sum(1)

    @property
    def stderr_NS(self) -> Tensor:
        """NaN with a single fold."""
        return fold_stderr(self.fold_KNS, self.share_K)

    @property
    def stderr_N(self) -> Tensor:
        return fold_stderr(self.fold_KNS.sum(2), self.share_K)

    @property
    def stable_NS(self) -> Tensor:
        """Every fold sees the same sign. A single fold proves nothing."""
        return same_sign(self.fold_KNS)

    @property
    def stable_N(self) -> Tensor:
        return same_sign(self.fold_KNS.sum(2))

    @property
    def counted_NS(self) -> Tensor:
        return self.batch.counted_NS

    @property
    def active_NS(self) -> Tensor:
        """Counted tokens that the loss cares about: the others have exactly no influence."""
        return self.counted_NS & ((self.coefficient[0] != 0) | (self.coefficient[1] != 0))

    @property
    def reliability(self) -> float | None:
        """Split-half correlation over active tokens, corrected to all of E; None if undefined."""
        return split_half(self.fold_KNS[:, self.active_NS])

    @property
    def rollout_reliability(self) -> float | None:
        return split_half(self.fold_KNS.sum(2)[:, self.active_NS.any(1)])

    @property
    def gradient(self) -> float:
        """What the batch did: the sum over all its tokens."""
        return float(self.value_NS.sum())

    @property
    def gradient_by_reverse(self) -> float:
        """The same by g_H . (gradient part): what the sum must close to."""
        return sum(parts["gradient"] for parts in self.modules.values())

    @property
    def steps_wide(self) -> tuple[float, ...]:
        """By central, of each fold: how far its points are from theta, in lengths of the step."""
        return tuple(one.length / self.reach if self.reach else inf for one in self.differences)

    @property
    def sum_rule_gap(self) -> float:
        """|sum of the tokens - reverse mode| by the sum of |tokens|."""
        size = float(self.value_NS.abs().sum())
        gap = abs(self.gradient - self.gradient_by_reverse)
        return gap / size if size else 0.0

    @property
    def closes(self) -> bool:
        """Whether the sum rule closes: within SLACK of the value, or SHARE of its error bar."""
        exact = self.gradient_by_reverse
        stderr = float(fold_stderr(self.fold_KNS.sum((1, 2)), self.share_K))
        allowed = max(SLACK * abs(exact), 0.0 if isnan(stderr) else SHARE * stderr)
        return abs(self.gradient - exact) <= allowed

    @property
    def total(self) -> float:
        """deltaH1 of the whole step."""
        return self.gradient + sum(self.baseline.values())

    @property
    def cancellation(self) -> float:
        """sum |parts| / |sum|, parts being rollouts, momentum and decay; at least 1."""
        parts = float(self.rollout_N.abs().sum()) + sum(map(abs, self.baseline.values()))
        if parts == 0:
            return 1.0
        return parts / abs(self.total) if self.total else inf

    @property
    def withheld(self) -> bool:
        """Shares of the total mean nothing: it is what is left of much larger parts."""
        return self.cancellation > MAX_CANCELLATION


def token_influence(
    policy: Policy,
    evaluation: Rollouts,
    trained: Policy,
    batch: UpdateBatch,
    objective: Objective,
    direction: Direction,
    *,
    estimand: Estimand,
    folds: int = 2,
    mode: Mode = "auto",
    microbatch: int = 8,
    base: Scores | None = None,
    scores: Scores | None = None,
    gradients: Sequence[Params] | None = None,
) -> TokenInfluence:
    """Every update token's share of this step's entropy change.

    `policy` measures entropy on `evaluation`; `trained` is the same model as the loss sees it
    (training's temperature; for DoRA `as_trained()`). `direction` is the step of this batch under
    this objective. `base` are the scores of `evaluation` under `policy`, `scores` those of the
    batch under `trained`, `gradients` the g_H^(k) of `prompt_folds`, where another pass has made
    them. Costs one backward over E and, by jvp, one forward of U with `folds` derivatives; by
    central, two or four forwards of U for each fold.
    """
    preconditioner = _checked(policy, trained, batch, direction, estimand)
    whole(evaluation)
    whole(batch.rollouts)
    how = used_forward_mode(trained, batch.rollouts, mode)
    _check_support(trained, how)
    require_full_precision(policy.params)
    fold_N = prompt_folds(evaluation, folds)
    check_repeatable(policy, evaluation)
    base = base or score_all(policy, policy.params, evaluation, microbatch=microbatch)
    if scores is None and how == "central":
        scores = score_all(trained, trained.params, batch.rollouts, microbatch=microbatch)

    if gradients is None:
        cotangent, gradients = entropy_coefficients(base, evaluation, estimand), []
        for k in range(folds):
            rows_N = (fold_N == k).nonzero().flatten()
            cotangent_k = Scores(*(x_NS[rows_N] for x_NS in cotangent))
            gradients.append(
                weighted_gradient(
                    policy, evaluation.take(rows_N), cotangent_k, microbatch=microbatch
                )
            )
    elif len(gradients) != folds:
        raise ValueError(
            f"Got {len(gradients)} gradients for {folds} folds; expected one for each, of the "
            "prompts that prompt_folds deals to it."
        )
    reach = direction.lr * norm(direction.total)
    seen, slope_K, differences = score_slopes(
        trained,
        batch.rollouts,
        [
            {name: preconditioner[name].double() * g.double() for name, g in g_k.items()}
            for g_k in gradients
        ],
        mode=how,
        microbatch=microbatch,
        reach=reach,
    )
    scores = scores or seen
    per_fold = [_by_module(g_k, direction) for g_k in gradients]
    assert scores is not None  # given, or a by-product of the first fold
    scores = Scores(*(inside(x_NS, batch.rollouts.response_NS) for x_NS in scores))
    module_folds = {
        name: {
            part: torch.tensor([found[name][part] for found in per_fold], dtype=torch.float64)
            for part in parts
        }
        for name, parts in per_fold[0].items()
    }
    modules = {
        name: {part: float(value_K.sum()) for part, value_K in parts.items()}
        for name, parts in module_folds.items()
    }
    found = TokenInfluence(
        batch=batch,
        objective=objective,
        scores=scores,
        coefficient=token_coefficients(objective, scores, batch),
        slope_K=slope_K,
        lr=direction.lr,
        clip_factor=direction.clip_factor,
        estimand=estimand,
        baseline={
            part: sum(parts[part] for parts in modules.values())
            for part in direction.parts
            if part != "gradient"
        },
        modules=modules,
        g_H={name: sum_of(g_k[name] for g_k in gradients) for name in gradients[0]},
        module_folds=module_folds,
        share_K=_shares(base, evaluation, estimand, fold_N, folds),
        differences=differences,
        reach=reach,
        doubts=stale_reasons(base, evaluation, estimand),
    )
    if not cut_over_ranks(trained):
        _check_sum_rule(found)
    return replace(found, doubts=(*found.doubts, *_doubts_of_differences(found)))


def of_coefficients(found: TokenInfluence, coefficient: Scores) -> Tensor:
    """value_NS if the loss had these token coefficients, all else of the step as it was."""
    return folds_of_coefficients(found, coefficient).sum(0)


def folds_of_coefficients(found: TokenInfluence, coefficient: Scores) -> Tensor:
    """[K, N, S]; see `of_coefficients`."""
    (l_NS, h_NS), (dl_KNS, dh_KNS) = coefficient, found.slope_K
    cotangent_KNS = l_NS.double() * dl_KNS + h_NS.double() * dh_KNS
    return inside(-found.lr * found.clip_factor * cotangent_KNS, found.counted_NS)


def _checked(
    policy: Policy,
    trained: Policy,
    batch: UpdateBatch,
    direction: Direction,
    estimand: Estimand,
) -> Params:
    """The preconditioner, after refusing what does not fit together."""
    check_direction(policy, direction)
    check_params("the trained policy", trained.params, policy.params)
    if not isinstance(batch, UpdateBatch):
        raise TypeError(
            f"Got {type(batch).__name__} as update batch; expected an UpdateBatch, which has "
            "advantages beside its rollouts."
        )
    if direction.preconditioner is None or "gradient" not in direction.parts:
        raise ValueError(
            f"This direction has parts {sorted(direction.parts)} and "
            f"{'no' if direction.preconditioner is None else 'a'} preconditioner; expected a "
            "'gradient' part and a preconditioner, which say what each token's gradient became. "
            "An observed step has neither: rebuild it with compute_update_vector_adamw."
        )
    check_estimand(policy, estimand)
    return direction.preconditioner


def _check_support(trained: Policy, how: How) -> None:
    if how == "central" and trained.top_p < 1:
        raise ValueError(
            f"mode='central' with top_p = {trained.top_p:g}: a difference would step over changes "
            "of the truncated distribution's support. Use mode='jvp', which keeps the support."
        )


def _by_module(g: Params, direction: Direction) -> dict[str, dict[str, float]]:
    parts = list(direction.parts)
    products = iter(dots([(direction.parts[part][name], g[name]) for name in g for part in parts]))
    return {name: {part: direction.lr * next(products) for part in parts} for name in g}


def _shares(
    base: Scores, evaluation: Rollouts, estimand: Estimand, fold_N: Tensor, folds: int
) -> Tensor:
    """Each fold's part of sum_i w_i B_i."""
    moved_NS = base.logprob_NS - drawn_with(base, evaluation)
    _, bottom_N = ratio_sums(payload(base, estimand), moved_NS, evaluation, estimand)
    bottom_N = evaluation.weight_N * bottom_N
    share_K = bottom_N.new_zeros(folds).index_add(0, fold_N, bottom_N) / bottom_N.sum()
    if bool((share_K <= 0).any()):
        empty = int((share_K <= 0).nonzero()[0])
        raise ValueError(
            f"Fold {empty} of {folds} has no weight: all its evaluation rollouts have weight 0. "
            "Leave them out, or take fewer folds."
        )
    return share_K


def _check_sum_rule(influence: TokenInfluence) -> None:
    """The tokens' influences and g_H . gradient are one number, reached in two ways."""
    one, other = influence.gradient, influence.gradient_by_reverse
    scale = float(influence.value_NS.abs().sum()) + abs(other)
    if abs(one - other) > SUM_RULE * scale:
        raise ValueError(
            f"The tokens' influences sum to {one:.6g}; along the direction's gradient part the "
            f"entropy moves by {other:.6g}. Expected the same: give the batch, objective and "
            f"trained policy (for DoRA `as_trained()`) that this direction was made with."
        )


def _doubts_of_differences(influence: TokenInfluence) -> tuple[str, ...]:
    """None of exact derivatives, whose sum rule was checked."""
    if not influence.differences:
        return ()
    doubts = [one.doubt for one in influence.differences if one.doubt]
    if not influence.closes:
        doubts.append(
            f"the sum rule does not close: by differences the tokens' influences sum to "
            f"{influence.gradient:.4g}, reverse mode gives {influence.gradient_by_reverse:.4g} on "
            f"the same rollouts, {influence.sum_rule_gap:.2g} of the sum of |influences| apart"
        )
    return tuple(dict.fromkeys(doubts))
