"""What if the update had been another: re-predicted by arithmetic, confirmed by one real step.

    dH1' = sum over parts of the baseline
           - lr c sum_ik [ dL'/dl_ik D_u l_ik + dL'/dh_ik D_u h_ik ],      u = P g_H

An intervention changes the token coefficients dL'/dl and dL'/dh (see `attribution.counterfactual`);
the slopes D_u are in the token table, so `repredict` calls no model. *Frozen* are the advantages,
the normalisers, Adam's denominator inside P, and the clip factor c.

`confirm` makes the step: the new loss's gradient by one backward over U, denominator and clip
factor from it, and the entropy change measured on E; `attribution.whatif_answers` then says where
the numbers part.

Advantages and normalisers stay as recorded there too: they are part of what the intervention means
(`attribution.matrix.leave_one_out` recomputes them). Momentum is what earlier batches left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from entropy_experiments.attribution.budget import EntropyBudget, entropy_budget
from entropy_experiments.attribution.counterfactual import Counterfactual, Recorded
from entropy_experiments.attribution.folds import fold_stderr
from entropy_experiments.attribution.interventions import Intervention, applied
from entropy_experiments.attribution.token_table import (
    StepTable,
    TokenTable,
    baseline_folds,
    facts,
    fold_columns,
)
from entropy_experiments.attribution.tokens import TokenInfluence, folds_of_coefficients
from entropy_experiments.attribution.whatif_answers import Confirmation, Prediction
from entropy_experiments.attribution.whatif_text import parse
from entropy_experiments.estimate.curvature import curvature
from entropy_experiments.estimate.first_order import first_order
from entropy_experiments.estimate.measured import measured
from entropy_experiments.estimate.modes import Mode, used_forward_mode
from entropy_experiments.estimate.noise import REPACKINGS
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.numerics.derivatives import pullback_sum
from entropy_experiments.types import (
    Direction,
    OptimizerState,
    Params,
    Policy,
    Rollouts,
    Scores,
)
from entropy_experiments.types.direction import check_finite
from entropy_experiments.update.optimizer import direction_like
from entropy_experiments.update.rebuilt import rebuilt_direction

__all__ = [
    "Confirmation",
    "EntropyBudget",
    "Prediction",
    "TokenTable",
    "confirm",
    "counterfactual_gradient",
    "entropy_budget",
    "facts",
    "fold_columns",
    "parse",
    "recomputed_direction",
    "repredict",
]

WhatIf = str | Intervention | Iterable[str | Intervention]


def repredict(found: StepTable, whatif: WhatIf, *, curvature: float | None = None) -> Prediction:
    """Arithmetic on the token table; `found` is a TokenInfluence, or a TokenTable from a file.

    `curvature` is the recorded step's, in nats (lr^2 / 2 H''): it grows with lr squared. Another
    direction bends in another way, which only `confirm` can see.
    """
    interventions = _read(whatif)
    made, before, after = _applied(found, interventions)
    factor = made.lr / found.lr
    old_KNS, new_KNS = _folds(found, before), factor * _folds(found, after)
    counted_NS, notes = found.batch.counted_NS, made.notes
    changed_NS = torch.stack([a != b for a, b in zip(before, after, strict=True)]).any(0)
    tokens = int((changed_NS & counted_NS).sum())
    if not tokens and factor == 1 and not notes:
        notes = ("no token's coefficient changes",)
    # Over counted tokens alone: sums then do not depend on the padding, which no table saves.
    old_K, new_K = (x_KNS[:, counted_NS].sum(1) for x_KNS in (old_KNS, new_KNS))
    baseline_K = baseline_folds(found)
    # The learning rate scales momentum and decay too, and their error with them.
    more_K = torch.zeros_like(old_K) if factor == 1 else _times(factor - 1, baseline_K)
    return Prediction(
        name="; ".join(intervention.name for intervention in interventions) or "as recorded",
        gradient=float(new_K.sum()),
        baseline={part: factor * value for part, value in found.baseline.items()},
        recorded=float(old_K.sum()) + sum(found.baseline.values()),
        stderr=_stderr(new_K, _times(factor, baseline_K), found.share_K),
        change_stderr=_stderr(new_K - old_K, more_K, found.share_K),
        lr=made.lr,
        curvature=None if tokens or curvature is None else factor**2 * curvature,
        tokens=tokens,
        notes=notes,
        value_NS=new_KNS.sum(0),
    )


def counterfactual_gradient(policy: Policy, made: Counterfactual, *, microbatch: int = 8) -> Params:
    """The gradient of L', by backward through the model: nothing of the token table is used."""

    def loss_of(rows_N: Tensor, columns: slice, part: Rollouts) -> Callable[[Params], Tensor]:
        if not len(rows_N):  # an idle part: a pass whose gradient is zero
            return lambda params: 0.0 * policy.score(params, part).logprob_NS.sum()
        return lambda params: made.loss(policy.score(params, part), rows_N, columns)

    parts = (loss_of(*part) for part in made.recorded.batch.rollouts.split(microbatch, policy))
    gradient = pullback_sum(parts, policy.params)[1]
    check_finite("counterfactual loss gradient", gradient)
    return gradient


def recomputed_direction(
    params: Params,
    gradient: Params,
    direction: Direction,
    *,
    lr: float,
    optimizer: OptimizerState | None = None,
    max_grad_norm: float | None = None,
) -> Direction:
    """The step on another loss gradient.

    Without `optimizer` it is frozen: the recorded step's P, clip factor, momentum and decay. With
    it, everything is made again.
    """
    if optimizer is not None:
        step = rebuilt_direction(params, gradient, optimizer, max_grad_norm=max_grad_norm)
        return replace(step, lr=lr)
    if direction.preconditioner is None:
        raise ValueError(
            "This direction has no preconditioner, so another loss cannot be stepped with it; "
            "expected one rebuilt by compute_update_vector_adamw."
        )
    scale = {name: p.double() for name, p in direction.preconditioner.items()}
    moved = {name: -p * direction.clip_factor * gradient[name] for name, p in scale.items()}
    return direction_like(
        params, {**direction.parts, "gradient": moved}, lr, scale, direction.clip_factor
    )


def confirm(
    policy: Policy,
    evaluation: Rollouts,
    trained: Policy,
    found: TokenInfluence,
    direction: Direction,
    optimizer: OptimizerState,
    whatif: WhatIf,
    *,
    max_grad_norm: float | None = None,
    mode: Mode = "auto",
    microbatch: int = 8,
    base: Scores | None = None,
    repackings: int = REPACKINGS,
) -> Confirmation:
    """Make the counterfactual step and measure it.

    `found` is the recorded step's token table, `direction` that step, `optimizer` the state before
    it. Costs one backward over U, six jvps and three forwards over E (`base` saves one), and one
    forward for each of the `repackings` that give the measurement's noise floor.
    """
    interventions = _read(whatif)
    made, _, _ = _applied(found, interventions)
    gradient = counterfactual_gradient(trained, made, microbatch=microbatch)
    lr, params, estimand = made.lr, policy.params, found.estimand
    frozen = recomputed_direction(params, gradient, direction, lr=lr)
    real = recomputed_direction(
        params, gradient, direction, lr=lr, optimizer=optimizer, max_grad_norm=max_grad_norm
    )
    options = EstimatorOptions(
        form=estimand.form,
        unit=estimand.unit,
        entropy=estimand.entropy,
        prompts=estimand.prompts,
        horizon=estimand.horizon,
        mode=used_forward_mode(policy, evaluation, mode),
        microbatch=microbatch,
        repackings=0,
    )
    straight = lr * first_order(policy, evaluation, frozen, options, base=base)
    if policy.top_p < 1:
        bend, recomputed = None, lr * first_order(policy, evaluation, real, options, base=base)
    else:
        second = curvature(policy, evaluation, real, options)
        bend, recomputed = lr**2 / 2 * second, lr * second.diagnostics["slope"]
    base = base or score_all(policy, policy.params, evaluation, microbatch=microbatch)
    with_floor = replace(options, repackings=repackings)
    return Confirmation(
        prediction=repredict(found, interventions),
        frozen=straight,
        recomputed=recomputed,
        curvature=bend,
        measured=measured(policy, evaluation, real, real.lr, with_floor, base=base),
        measured_recorded=measured(policy, evaluation, direction, direction.lr, options, base=base),
        clip_factors=(direction.clip_factor, real.clip_factor),
    )


def _read(whatif: WhatIf) -> tuple[Intervention, ...]:
    if isinstance(whatif, str):
        return parse(whatif)
    if isinstance(whatif, Iterable):
        return tuple(one for part in whatif for one in _read(part))
    return (whatif,)


def _applied(
    found: StepTable, interventions: tuple[Intervention, ...]
) -> tuple[Counterfactual, Scores, Scores]:
    """The counterfactual loss, and token coefficients before and after."""
    recorded = Recorded(
        objective=found.objective, scores=found.scores, batch=found.batch, lr=found.lr
    )
    before = applied((), recorded).coefficient
    influence_NS = _folds(found, before).sum(0)
    made = applied(interventions, replace(recorded, influence_NS=influence_NS))
    return made, before, made.coefficient


def _folds(found: StepTable, coefficient: Scores) -> Tensor:
    """[K, N, S], at the recorded learning rate."""
    # A TokenTable has all that is read there: slopes, lr, clip factor, counted_NS.
    return folds_of_coefficients(cast(TokenInfluence, found), coefficient)


def _times(factor: float, fold_K: Tensor | None) -> Tensor | None:
    return None if fold_K is None else factor * fold_K


def _stderr(one_K: Tensor, other_K: Tensor | None, share_K: Tensor | None) -> float | None:
    """Of the sum of both; None: there is one fold, or the other's are not known."""
    if len(one_K) == 1 or other_K is None:
        return None
    return float(fold_stderr(one_K + other_K.to(one_K), share_K))
