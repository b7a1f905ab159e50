"""What if the update had been another: re-predicted by arithmetic, confirmed by one real step.

    dH1' = sum over parts of the baseline
           - lr c sum_ik [ dL'/dl_ik D_u l_ik + dL'/dh_ik D_u h_ik ],      u = P g_H

An intervention changes the token coefficients dL'/dl and dL'/dh (see `influence.counterfactual`);
the slopes D_u are in the token table, so `repredict` calls no model. *Frozen* are the advantages,
the normalisers, Adam's denominator inside P, and the clip factor c.

`confirm` makes the step: the new loss's gradient by one backward over U, denominator and clip
factor from it, and the entropy change measured on E. It then says where the numbers part:

    measured = frozen prediction + (denominator and clip) + curvature + rest

Advantages and normalisers stay as recorded there too: they are part of what the intervention means
(`influence.matrix.leave_one_out` recomputes them). Momentum is what earlier batches left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from entropy_experiments.estimate.curvature import curvature
from entropy_experiments.estimate.first_order import PAIRED_WITH, first_order
from entropy_experiments.estimate.measured import measured
from entropy_experiments.estimate.noise import REPACKINGS
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.influence.budget import EntropyBudget, entropy_budget
from entropy_experiments.influence.counterfactual import Counterfactual, Recorded
from entropy_experiments.influence.folds import fold_stderr
from entropy_experiments.influence.interventions import Intervention, applied
from entropy_experiments.influence.token_table import StepTable, TokenTable, facts, fold_columns
from entropy_experiments.influence.tokens import TokenInfluence
from entropy_experiments.influence.whatif_text import parse
from entropy_experiments.numerics.derivatives import How, pullback_sum
from entropy_experiments.types import (
    Direction,
    Estimate,
    OptimizerState,
    Params,
    Policy,
    Rollouts,
    Scores,
    SGDGroup,
)
from entropy_experiments.types.direction import check_finite
from entropy_experiments.update.adamw import adamw_direction
from entropy_experiments.update.optimizer import direction_like
from entropy_experiments.update.sgd import sgd_direction

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
DENOMINATOR, CURVATURE = "denominator and clip", "curvature"


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """First-order entropy change of the counterfactual step, in nats."""

    name: str
    gradient: float
    baseline: Mapping[str, float]
    recorded: float
    """The same of the step as it was made."""
    stderr: float | None
    """Of `gradient`, over folds of E's prompts; None: the table has a single fold."""
    change_stderr: float | None
    """Of the change in `gradient`: paired, since both come from the same folds."""
    lr: float
    curvature: float | None
    """lr^2 / 2 H'', if the recorded step's was given and nothing but the learning rate changed."""
    tokens: int
    """Tokens whose coefficients changed."""
    notes: tuple[str, ...]
    value_NS: Tensor = field(repr=False)

    @property
    def total(self) -> float:
        return self.gradient + sum(self.baseline.values())

    @property
    def change(self) -> float:
        return self.total - self.recorded

    def __str__(self) -> str:
        head = (
            f"{self.name}: {self.total:+.4g} nats instead of {self.recorded:+.4g} ({self.tokens} "
            "tokens changed)"
        )
        return "\n".join([head, *(f"  {note}" for note in self.notes)])


def repredict(found: StepTable, whatif: WhatIf, *, curvature: float | None = None) -> Prediction:
    """Arithmetic on the token table; `found` is a TokenInfluence, or a TokenTable from a file.

    `curvature` is the recorded step's, in nats (lr^2 / 2 H''): it grows with lr squared. Another
    direction bends in another way, which only `confirm` can see.
    """
    interventions = _read(whatif)
    made, before, after = _applied(found, interventions)
    factor = made.lr / found.lr
    old_KT = _folds(found, before)
    new_KT = factor * _folds(found, after)
    counted_NS, notes = found.batch.counted_NS, made.notes
    changed_NS = torch.stack([a != b for a, b in zip(before, after, strict=True)]).any(0)
    tokens = int((changed_NS & counted_NS).sum())
    if not tokens and factor == 1 and not notes:
        notes = ("no token's coefficient changes",)
    value_NS = torch.zeros_like(found.scores.logprob_NS)
    value_NS[counted_NS] = new_KT.sum(0)
    return Prediction(
        name="; ".join(intervention.name for intervention in interventions) or "as recorded",
        gradient=float(new_KT.sum(0).sum()),
        baseline={part: factor * value for part, value in found.baseline.items()},
        recorded=float(old_KT.sum(0).sum()) + sum(found.baseline.values()),
        stderr=_stderr(new_KT, found.share_K),
        change_stderr=_stderr(new_KT - old_KT, found.share_K),
        lr=made.lr,
        curvature=None if tokens or curvature is None else factor**2 * curvature,
        tokens=tokens,
        notes=notes,
        value_NS=value_NS,
    )


def counterfactual_gradient(policy: Policy, made: Counterfactual, *, microbatch: int = 8) -> Params:
    """The gradient of L', by backward through the model: nothing of the token table is used."""

    def loss_of(rows_N: Tensor, columns: slice, part: Rollouts) -> Callable[[Params], Tensor]:
        return lambda params: made.loss(policy.score(params, part), rows_N, columns)

    parts = (loss_of(*part) for part in made.recorded.batch.rollouts.split(microbatch))
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
        step = sgd_direction if isinstance(optimizer.groups[0], SGDGroup) else adamw_direction
        return replace(step(params, gradient, optimizer, max_grad_norm=max_grad_norm), lr=lr)
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Confirmation:
    """One counterfactual step, predicted in two ways and measured; nats of the step."""

    prediction: Prediction
    """From the token table."""
    frozen: Estimate
    """The same number from the model: the new gradient, the recorded P and clip factor."""
    recomputed: Estimate
    """With Adam's denominator and the clip factor made anew."""
    curvature: Estimate | None
    """lr^2 / 2 times the second derivative; None: not defined for a top_p law."""
    measured: Estimate
    measured_recorded: Estimate
    """The step as it was made, measured on the same rollouts."""
    clip_factors: tuple[float, float]
    """Recorded and recomputed."""

    @property
    def change(self) -> Estimate:
        """What the intervention did, measured; paired, so far sharper than either measurement."""
        return self.measured - self.measured_recorded

    @property
    def explained(self) -> dict[str, Estimate]:
        """What the frozen prediction leaves out."""
        found = {DENOMINATOR: self.recomputed - self.frozen}
        return found if self.curvature is None else {**found, CURVATURE: self.curvature}

    @property
    def difference(self) -> Estimate:
        """Measured minus frozen prediction, with its paired interval."""
        return self.measured - self.frozen

    @property
    def rest(self) -> Estimate:
        """What the explanation leaves of the difference: third order and higher."""
        gap = self.measured - self.recomputed
        return gap if self.curvature is None else gap - self.curvature

    @property
    def agrees(self) -> bool | None:
        """The frozen prediction lies in the measured interval; None: there is no interval."""
        if self.measured.interval is None:
            return None
        return self.measured.covers(self.prediction.total)

    @property
    def effect_agrees(self) -> bool | None:
        """The predicted *change* lies in the paired interval of the measured one: a sharper test.

        Under Adam it often fails where `agrees` holds: the denominator gives back much of what
        the intervention took out of the gradient.
        """
        if self.change.interval is None:
            return None
        return self.change.covers(self.prediction.change)

    @property
    def accounted(self) -> bool | None:
        """Denominator, clip and curvature lie in the difference's paired interval."""
        if self.difference.interval is None:
            return None
        return self.difference.covers(sum(part.value for part in self.explained.values()))

    @property
    def verdict(self) -> str:
        """In words: do prediction and measurement agree, and if not, why not."""
        shares = ", ".join(f"{name} {part.value:+.3g}" for name, part in self.explained.items())
        parted = f"measured - predicted = {self.difference}; of that {shares}"
        left = f"{parted}, which leaves {self.rest.value:+.3g}"
        if self.agrees is None or self.accounted is None:
            return f"not confirmed, for want of an interval: {left}"
        if self.agrees:
            return f"confirmed: the frozen prediction is inside the measured interval. {left}"
        if self.accounted:
            return f"outside the measured interval, and explained: {left}"
        return (
            f"outside the measured interval, and NOT explained: {left}. The step is beyond second "
            "order (take a smaller learning rate), or the measurement is not to be trusted"
        )

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.prediction.name}: predicted {self.prediction.total:+.4g}, measured "
                f"{self.measured}",
                f"  change by it: predicted {self.prediction.change:+.4g}, measured {self.change}",
                f"  {self.verdict}",
                *(f"  {note}" for note in self.prediction.notes),
            ]
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
    mode: How = "jvp",
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
    speaks = {
        "unit": estimand.unit,
        "entropy": estimand.entropy,
        "prompts": estimand.prompts,
        "horizon": estimand.horizon,
        "microbatch": microbatch,
    }
    form = next(slope for slope, paired in PAIRED_WITH.items() if paired == estimand.form)
    slopes = {**speaks, "form": form, "mode": mode, "repackings": 0}
    straight = lr * first_order(policy, evaluation, frozen, base=base, **slopes)
    if policy.top_p < 1:
        bend, recomputed = None, lr * first_order(policy, evaluation, real, base=base, **slopes)
    else:
        second = curvature(policy, evaluation, real, **slopes)
        bend, recomputed = lr**2 / 2 * second, lr * second.diagnostics["slope"]
    base = base or score_all(policy, policy.params, evaluation, microbatch=microbatch)

    def moved(step: Direction, floor: int) -> Estimate:
        asked = {**speaks, "form": estimand.form, "base": base, "repackings": floor}
        return measured(policy, evaluation, step, step.lr, **asked)

    return Confirmation(
        prediction=repredict(found, interventions),
        frozen=straight,
        recomputed=recomputed,
        curvature=bend,
        measured=moved(real, repackings),
        measured_recorded=moved(direction, 0),
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
    influence_NS = torch.zeros_like(found.scores.logprob_NS)
    influence_NS[found.batch.counted_NS] = _folds(found, before).sum(0)
    made = applied(interventions, replace(recorded, influence_NS=influence_NS))
    return made, before, made.coefficient


def _folds(found: StepTable, coefficient: Scores) -> Tensor:
    """[K, counted tokens]: influences under these coefficients, at the recorded learning rate."""
    counted_NS = found.batch.counted_NS
    worth_KT = sum(
        c_NS[counted_NS] * slope_KNS[:, counted_NS]
        for c_NS, slope_KNS in zip(coefficient, found.slope_K, strict=True)
    )
    assert isinstance(worth_KT, Tensor)
    return -found.lr * found.clip_factor * worth_KT


def _stderr(fold_KT: Tensor, share_K: Tensor | None) -> float | None:
    return None if len(fold_KT) == 1 else float(fold_stderr(fold_KT.sum(1), share_K))
