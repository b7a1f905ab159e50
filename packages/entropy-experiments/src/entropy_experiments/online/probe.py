"""Predict a step before the optimizer makes it, measure it afterwards; touch nothing.

    probe = OnlineProbe(policy, Fresh(draw))
    loss.backward()
    prediction = probe.before_step(named_gradients(model), optimizer)
    optimizer.step()
    measurement = probe.after_step()

Before: the optimizer's step is rebuilt from its state and the (clipped) gradient, and one pass of
differentiation (forward mode, or what the model has: `estimate.modes`) over the evaluation rollouts
gives H, its slope along the step, and the scores that the measurement starts from. After: one plain
pass at the parameters as they now are.
Both are of the same rollouts, so their difference is the bend of the curve and no sampling noise:

    bend = measured - predicted,      linear range = lr * 10 % * |predicted / bend|

`order=2` adds one plain pass before the step, at theta - eta v. With Delta(-eta) measured there on
the same rollouts the prediction is right to second order, and still made before the step is:

    second order = 2 eta slope + Delta(-eta) = Delta(eta) + O(eta^3)

Gradients are read, never written; the model's mode, `.grad` and the global random numbers stay as
they are. Every rank calls both methods with the same gradient; microbatches are shared out.
Arguments are checked when they are passed: later, in a training, a probe that finds a mistake can
only switch itself off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from entropy_experiments.distributed import ALONE, Ranks, across
from entropy_experiments.estimate.curvature import LINEAR_TOLERANCE
from entropy_experiments.estimate.first_order import (
    first_order,
    led_slope,
    scores_along,
    slope_of_scores,
)
from entropy_experiments.estimate.level import level_of_scores, within_entropy
from entropy_experiments.estimate.measured import (
    change,
    coarse_weights,
    coarsest_dtype,
    even_part,
)
from entropy_experiments.estimate.modes import used_forward_mode
from entropy_experiments.estimate.options import SlopeForm, slope_estimand
from entropy_experiments.estimate.own_batch import OwnBatch, own_slopes
from entropy_experiments.estimate.ratio import check_repeatable, score_all
from entropy_experiments.estimate.several_directions import step_rounding
from entropy_experiments.models.functional_model import refuse_compiled
from entropy_experiments.numerics.derivatives import How, full_precision, norm, shifted
from entropy_experiments.online.evaluation_rollouts import Buffer
from entropy_experiments.threads import chosen_threads
from entropy_experiments.types import Direction, Estimate, Params, Policy, Rollouts, Scores
from entropy_experiments.types.direction import BASELINE_PARTS
from entropy_experiments.update.certificate import APART
from entropy_experiments.update.live import live_direction
from entropy_experiments.update.optimizer import own_step

WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
NEVER_MADE = (
    "a step was predicted, and no weight changed: it was never made, or is lost in the weights' "
    "rounding"
)
SKIPPED = "no weight changed: the optimizer made no step"


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPrediction:
    """What the step about to be made will do."""

    step: int
    entropy: Estimate
    """H before the step."""
    change: Estimate
    """First order: the straight line."""
    second_order: Estimate | None
    """2 eta slope + Delta(-eta), paired with `change`; None with order=1."""
    baseline: Estimate | None
    """The part of momentum and weight decay."""
    lr: float
    grad_norm: float
    param_norm: float
    rollouts: int

    @property
    def best(self) -> Estimate:
        """The prediction of the highest order there is."""
        return self.change if self.second_order is None else self.second_order

    @property
    def direct(self) -> Estimate:
        """The same states, flatter or sharper choices."""
        return self.change.diagnostics["direct"]

    @property
    def state(self) -> Estimate:
        """Other states visited."""
        return self.change.diagnostics["state"]

    @property
    def baseline_share(self) -> float | None:
        """Momentum's and decay's part of the predicted change; above 1: the gradient opposed it."""
        if self.baseline is None or self.change.value == 0:
            return None
        return self.baseline.value / self.change.value


@dataclass(frozen=True, kw_only=True, eq=False)
class StepMeasurement:
    """What the step did."""

    prediction: StepPrediction
    change: Estimate
    step_norm: float
    """Norm of the parameter change; 0: the optimizer skipped the step."""
    mismatch: float | None
    """|change of the parameters - predicted change| over the former: 0 for the step we rebuilt.

    None: a step was predicted, and no weight changed.
    """

    @property
    def never_made(self) -> bool:
        """A step was predicted, and no weight changed: there is nothing to compare."""
        return self.mismatch is None

    @property
    def skipped(self) -> bool:
        return self.step_norm == 0

    @property
    def apart(self) -> bool:
        """The step that was made is not the one that was predicted."""
        return self.mismatch is not None and not self.mismatch <= APART

    @property
    def why_not(self) -> tuple[str, ...]:
        """Why prediction and measurement are not to be trusted as one step's; empty: they are."""
        reasons = []
        if self.never_made:
            reasons.append(NEVER_MADE)
        elif self.skipped:
            reasons.append(SKIPPED)
        elif self.apart:
            reasons.append(
                f"the step that was made is {self.mismatch:.0%} away from the one predicted, more "
                f"than {APART:.0%}: gradients were changed after the prediction (clip them before "
                "it), the optimizer has hooks or is a subclass with a step() of its own, or the "
                "weights' rounding took part of the step"
            )
        return tuple(dict.fromkeys((*reasons, *self.prediction.best.why_not, *self.change.why_not)))

    @property
    def bend(self) -> Estimate:
        """What the straight line missed; paired, hence far less noisy than either."""
        return self.change - self.prediction.change

    @property
    def second_miss(self) -> Estimate | None:
        """What the second-order prediction missed, paired; None with order=1."""
        second = self.prediction.second_order
        return None if second is None else self.change - second

    @property
    def linear_range(self) -> float | None:
        """The learning rate up to which the prediction would be within 10 % of the measurement."""
        bend, predicted = abs(self.bend.value), self.prediction.change
        if self.skipped or bend == 0:
            return None
        if predicted.interval is not None and predicted.covers(0.0):
            return None  # a tenth of a change that may be 0
        return LINEAR_TOLERANCE * abs(predicted.value) / bend * self.prediction.lr


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pending:
    prediction: StepPrediction
    rollouts: Rollouts
    base: Scores
    before: Params
    in_sample: Estimate | None
    """The prediction before each prompt's own share was taken out of it."""
    expected: Params
    """The parameter change that was predicted."""


class OnlineProbe:
    """One policy in training, one evaluation buffer."""

    def __init__(
        self,
        policy: Policy,
        buffer: Buffer,
        *,
        form: SlopeForm = "to_go",
        horizon: int | None = None,
        microbatch: int = 8,
        parts: bool = True,
        order: int = 1,
        ranks: Ranks = ALONE,
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`context`: entered for everything that is computed with the policy."""
        check_order(order)
        self._context = context
        self.policy, self.buffer, self.ranks = policy, buffer, ranks
        self.form: SlopeForm = form
        self.estimand = slope_estimand(policy, form=form, horizon=horizon)
        self.microbatch, self.parts, self.order = microbatch, parts, order
        self.step = 0
        self._checked = False
        self.evaluated: Rollouts | None = None
        """The rollouts of the last prediction, until the step is measured."""
        self._pending: _Pending | None = None

    def before_step(
        self,
        gradient: Mapping[str, Tensor | None],
        optimizer: torch.optim.Optimizer,
        *,
        own: OwnBatch | None = None,
    ) -> StepPrediction:
        """Predict the step that `optimizer` would now make with these gradients.

        `gradient`: by the policy's parameter names, as the optimizer sees it (clipped, unscaled,
        averaged over ranks). None: that parameter has none, and the optimizer leaves it alone.
        `own`: evaluate the step on the batch that it learns from, instead of the buffer's rollouts.
        """
        with self._context(), full_precision(), chosen_threads():
            direction = live_direction(self.policy.params, gradient, optimizer)
            rollouts = self.buffer.at(self.step) if own is None else own.batch.rollouts
            if not self._checked:
                check_repeatable(self.policy, rollouts)
                self._checked = True
            mode = used_forward_mode(self.policy, rollouts, "auto")
            parts = self.parts or own is not None
            wanted = [direction, *([direction.only(*BASELINE_PARTS)] if parts else [])]
            base, slopes = scores_along(
                self.policy,
                rollouts,
                [part.total for part in wanted],
                mode=mode,
                lr=direction.lr,
                microbatch=self.microbatch,
                ranks=self.ranks,
            )
            present = {name: value for name, value in gradient.items() if value is not None}
            in_sample, *baseline = (
                direction.lr * self._slope(base, slope, rollouts, part, mode)
                for slope, part in zip(slopes, wanted, strict=True)
            )
            change = in_sample
            if own is not None:
                change = direction.lr * self._across(own, direction, present, base, slopes, mode)
            level = level_of_scores(base, rollouts, self.estimand)
            second = None
            if self.order == 2:
                # On its own batch only the bend is taken as it is seen (see `_corrected`).
                second = change + even_part(in_sample, self._behind(direction, rollouts, base))
                second = within_entropy(second, level)
            change = within_entropy(change, level)
            if reason := own_step(optimizer):
                change = change.doubted(reason)
                second = None if second is None else second.doubted(reason)
        if own is None:
            self.buffer.scored(base.logprob_NS)
        prediction = StepPrediction(
            step=self.step,
            entropy=level,
            change=change,
            second_order=second,
            baseline=baseline[0] if baseline else None,
            lr=direction.lr,
            grad_norm=norm(present),
            param_norm=norm(self.policy.params),
            rollouts=len(rollouts),
        )
        self._pending = _Pending(
            prediction=prediction,
            rollouts=rollouts,
            base=base,
            before={name: value.clone() for name, value in self.policy.params.items()},
            in_sample=None if own is None else in_sample,
            expected={n: direction.lr * value for n, value in direction.total.items()},
        )
        self.evaluated = rollouts
        return prediction

    @property
    def predicted(self) -> StepPrediction | None:
        """The last prediction, until its step is measured."""
        return None if self._pending is None else self._pending.prediction

    def after_step(self) -> StepMeasurement:
        """Measure the step that was made since `before_step`."""
        if self._pending is None:
            raise RuntimeError(
                "after_step() without before_step(): there is nothing to compare with. Call "
                "before_step(gradients, optimizer) between backward() and optimizer.step()."
            )
        pending, self._pending = self._pending, None
        after = self.policy.params
        actual = {name: after[name] - old for name, old in pending.before.items()}
        missed = shifted(actual, pending.expected, -1.0)
        size = norm(actual)
        with self._context(), full_precision(), chosen_threads():
            scores = score_all(
                self.policy,
                after,
                pending.rollouts,
                microbatch=self.microbatch,
                ranks=self.ranks,
            )
        seen = change(
            pending.base,
            scores,
            pending.rollouts,
            self.estimand,
            computed_in=coarsest_dtype(self.policy),
        )
        if doubt := coarse_weights(self.policy):
            seen = seen.doubted(doubt)
        measurement = StepMeasurement(
            prediction=pending.prediction,
            change=_corrected(seen, pending),
            step_norm=size,
            mismatch=_mismatch(size, norm(missed)),
        )
        self.buffer.release()
        self.evaluated = None
        self.step += 1
        return measurement

    def _slope(
        self, base: Scores, slope: Scores, rollouts: Rollouts, direction: Direction, mode: How
    ) -> Estimate:
        """Per unit learning rate; differences are led by one gradient."""
        estimate = slope_of_scores(base, slope, rollouts, self.estimand, mode=mode)
        if mode != "central":
            return estimate
        with across(self.ranks):
            exact = first_order(
                self.policy,
                rollouts,
                direction,
                form=self.form,
                mode="reverse",
                horizon=self.estimand.horizon,
                microbatch=self.microbatch,
                base=base,
                repackings=0,
            )
        return led_slope(estimate, exact, base, slope, rollouts)

    def _behind(self, direction: Direction, rollouts: Rollouts, base: Scores) -> Estimate:
        """Delta(-eta): the change that the opposite step would make. The model is not touched."""
        params, eta = self.policy.params, -direction.lr
        behind = shifted(params, direction.total, eta)
        scores = score_all(
            self.policy, behind, rollouts, microbatch=self.microbatch, ranks=self.ranks
        )
        rounding = step_rounding(params, behind, direction.total, eta)
        seen = change(base, scores, rollouts, self.estimand, step_rounding=rounding)
        doubt = coarse_weights(self.policy)
        return seen.doubted(doubt) if doubt else seen

    def _across(
        self,
        own: OwnBatch,
        direction: Direction,
        gradient: Params,
        base: Scores,
        slopes: Sequence[Scores],
        mode: How,
    ) -> Estimate:
        """The slope with every prompt's own share of the gradient left out of what it sees."""
        whole, baseline = slopes
        mine = own_slopes(
            self.policy,
            own,
            direction,
            {n: gradient.get(n, torch.zeros_like(p)) for n, p in self.policy.params.items()},
            mode=mode,
            microbatch=self.microbatch,
            ranks=self.ranks,
        )
        of_gradient = Scores(*(a_NS - b_NS for a_NS, b_NS in zip(whole, baseline, strict=True)))
        across = own.across(of_gradient, mine)
        total = Scores(*(a_NS + b_NS for a_NS, b_NS in zip(across, baseline, strict=True)))
        return slope_of_scores(base, total, own.batch.rollouts, self.estimand, mode=mode)

    def skip(self) -> None:
        """This step is not probed; what was begun for it is forgotten."""
        self._pending = None
        self.step += 1


def _mismatch(change_norm: float, missed: float) -> float | None:
    """Where nothing moved, `missed` is the norm of what was predicted: 0 if that was no step."""
    if change_norm:
        return missed / change_norm
    return None if missed else 0.0


def _corrected(seen: Estimate, pending: _Pending) -> Estimate:
    """On its own batch, a step's linear part is judged across prompts, the bend as it is seen."""
    if pending.in_sample is None:
        return seen
    better = seen + pending.prediction.change - pending.in_sample
    return replace(better, diagnostics=seen.diagnostics)


def named_gradients(model: torch.nn.Module) -> dict[str, Tensor | None]:
    """The gradients as they stand, by name; not copied."""
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def trained_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters that training moves, by name; not copied."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def check_counts(counts: Mapping[str, Any], *, least: int = 1) -> None:
    """Refuse an argument (by name) that is no whole number of at least `least`."""
    for name, value in counts.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} is {value!r}; expected a whole number, at least {least}.")


def check_positive(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"{name} is {value!r}; expected a number above 0.")


def check_order(order: Any) -> None:
    if isinstance(order, bool) or order not in (1, 2):
        raise ValueError(
            f"order is {order!r}; expected 1 (the straight line) or 2 (with its curvature, for one "
            "more pass without gradients before the step)."
        )


def check_bare(model: Any) -> None:
    if isinstance(model, WRAPPERS):
        raise ValueError(
            f"model is a {type(model).__name__}; expected the bare model inside it, whose "
            "parameters have their own names: give model.module."
        )
    refuse_compiled(model)
