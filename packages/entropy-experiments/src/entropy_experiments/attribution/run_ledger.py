"""Whose momentum? The ledger of a whole run: what every recorded token did, now and later.

Momentum is earlier batches, and they are recorded. With the optimizer's step as a recursion
(`update.recursion`; Adam: rho = b1, alpha = 1 - b1, K_t = lr_t / ((1 - b1^n_t) den_t), N = 0) and
g the gradient of entropy (or of expected reward) at both ends of a step,

    s_t = 1/2 (g(t) + g(t+1))                     path; tangent: s_t = g(t)
    A_t = K_t s_t + rho A_{t+1},   A = 0 after the last step             the costate, backwards
    C_t = alpha A_t + N s_t
    token (i,k) of batch t:   -c_t [ dL/dl_ik D_C l_ik + dL/dh_ik D_C h_ik ]      one jvp along C_t
    decay of step t:          -lr wd s_t.theta_t   (coupled: -wd C_t.theta_t, unclipped)
    momentum before the record:   -rho A_t0 . m_before
    uncovered:   s_t.(theta_{t+1} - theta_t - rebuilt step) - rho A_{t+1}.(m stored - m rebuilt)

All of them over all steps add up to sum_t s_t.(theta_{t+1} - theta_t), exactly. Along the path that
is H_T - H_0 up to an error of third order in the learning rate.

It is the *direct* effect through the optimizer. That a batch changed theta, and thereby what later
batches were and did, belongs to those later batches; what leaving a batch out would do is another
question, and costs a run. What the last batches will still do after the window is a memo and no
part of the sum: -sum_j rho^j K_{T+j} g(T).m, with slope, rate and den held and Adam's bias
correction going on.

Each quantity is kept in columns: the two halves of E's prompts (dH_a + dH_b = dH), the same of the
reward, and the tangent. The walk needs one step's states and the costate, whatever the number of
steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from entropy_experiments.attribution.folds import prompt_folds
from entropy_experiments.attribution.jacobian import inside, score_slopes
from entropy_experiments.estimate.first_order import scores_along, slope_of_scores
from entropy_experiments.estimate.gradient import entropy_coefficients, weighted_gradient
from entropy_experiments.estimate.level import level_of_scores
from entropy_experiments.estimate.modes import Mode, used_forward_mode
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.estimate.reward import (
    check_rewards,
    reward_estimand,
    reward_slope,
    single_prompts,
)
from entropy_experiments.estimate.reward_gradient import reward_coefficients
from entropy_experiments.numerics.derivatives import norm
from entropy_experiments.numerics.sums import by_prompt
from entropy_experiments.types import (
    Direction,
    Estimate,
    OptimizerState,
    Params,
    Policy,
    Rollouts,
    Scores,
    UpdateBatch,
    check_params,
)
from entropy_experiments.types.direction import check_finite
from entropy_experiments.types.estimate import combine
from entropy_experiments.update.gradient import loss_gradient
from entropy_experiments.update.objective import Objective, token_coefficients
from entropy_experiments.update.recursion import StepRecursion, first_moment, step_recursion

HALVES = 2
ENTROPY, REWARD, TANGENT = ("dH_a", "dH_b"), ("dR_a", "dR_b"), "dH_tangent"
"""Names of columns."""
Columns = Mapping[str, Params]
"""A parameter-shaped vector for each column."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Slopes:
    """Gradients at one checkpoint, from its own evaluation rollouts."""

    gradients: Columns
    """dH_a, dH_b, and dR_a, dR_b where E has rewards."""
    level: Estimate
    """Entropy."""
    reward: Estimate | None
    """Expected reward."""
    path: Estimate
    """1/2 g_H . (theta_{t+1} - theta_{t-1}): this checkpoint's part of the path's sum."""
    tangent: Estimate | None
    """g_H . (theta_{t+1} - theta_t); None: not asked for, or after the last step."""
    reward_path: Estimate | None


@dataclass(frozen=True, kw_only=True, eq=False)
class LedgerStep:
    """One step of the run, as it was made."""

    trained: Policy
    """The policy as the loss sees it, at theta_t."""
    after: Params
    """theta_{t+1}."""
    batch: UpdateBatch
    objective: Objective
    optimizer: OptimizerState
    """Before the step."""
    max_grad_norm: float | None
    later: OptimizerState | None = None
    """As stored before the next step; None: as rebuilt."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepShares:
    """What one step's batch, decay and rest did in the window; by column."""

    scores: Scores
    """Of the batch at theta_t."""
    coefficient: Scores
    tokens: Mapping[str, Tensor]
    """[N, S] each."""
    path: Mapping[str, float]
    """s_t.(theta_{t+1} - theta_t): the change of this step itself."""
    batch: Mapping[str, float]
    """All tokens, by the product of costate and gradient."""
    decay: Mapping[str, float]
    uncovered: Mapping[str, float]
    momentum_before: Mapping[str, float]
    """What the moment before this step does from here on: a line where the record begins."""
    unfinished: Mapping[str, float]
    """What the moment after this step will do later: a memo where the window ends."""
    by_parameter: Mapping[str, Mapping[str, float]] = field(repr=False)
    """The batch's part through each parameter."""
    carried: Columns = field(repr=False)
    """rho A_t, which the step before needs."""
    gradient: Params = field(repr=False)
    """c_t g_t, as it was rebuilt."""
    step_distance: float
    """|step made - step rebuilt| / |step made|."""
    gradient_distance: float | None
    """|gradient used - gradient rebuilt| / |gradient rebuilt|, by the moment that is stored after
    the step; None: none is, or there is no momentum and the step shows its gradient. Most of a step
    is momentum, which hides a wrong gradient."""
    clip_factor: float


def slopes_at(
    policy: Policy,
    evaluation: Rollouts,
    reward_N: Tensor | None,
    before: Params | None,
    after: Params | None,
    options: EstimatorOptions,
    *,
    tangent: bool = False,
    within_prompts: bool | None = None,
) -> Slopes:
    """g_H (and g_R) in two halves of the prompts, and this checkpoint's part of the path.

    Args:
        policy: At theta_t.
        evaluation: Drawn from this policy.
        reward_N: Their rewards; None: the ledger is of entropy alone.
        before: theta_{t-1}; None: the window begins here.
        after: theta_{t+1}; None: it ends here.
        options: What entropy is meant, and how it is computed.
        tangent: Also the slope along the step that follows.
        within_prompts: Compare rewards of one prompt's rollouts only; None: where every prompt
            has two or more.

    Returns:
        Gradients, levels and path terms. Costs one jvp and one backward over E, and a second
        backward for the reward.

    Raises:
        ValueError: If neither `before` nor `after` is known, or rollouts are stale.
    """
    if evaluation.behaviour_logprob_NS is not None:
        raise ValueError(
            "The evaluation rollouts have behaviour_logprob_NS; expected rollouts of the policy "
            "itself: the path's error is known for fresh ones alone. Draw them at this checkpoint."
        )
    estimand = options.estimand(policy)
    half = _half_way(policy.params, before, after)
    along = [half]
    if tangent and after is not None:
        along.append(_difference(after, policy.params))
    mode = used_forward_mode(policy, evaluation, options.mode)
    scores, slopes = scores_along(
        policy, evaluation, along, mode=mode, microbatch=options.microbatch, lr=1.0
    )
    fold_N = prompt_folds(evaluation, HALVES)

    def halves(cotangent: Scores, names: Sequence[str]) -> dict[str, Params]:
        out: dict[str, Params] = {}
        for k, name in enumerate(names):
            rows_N = (fold_N == k).nonzero().flatten()
            part = Scores(*(x_NS[rows_N] for x_NS in cotangent))
            out[name] = weighted_gradient(
                policy, evaluation.take(rows_N), part, microbatch=options.microbatch
            )
        return out

    gradients = halves(entropy_coefficients(scores, evaluation, estimand), ENTROPY)
    path, *rest = (
        slope_of_scores(scores, slope, evaluation, estimand, mode=mode) for slope in slopes
    )
    reward = reward_path = None
    if reward_N is not None:
        reward_N = check_rewards(reward_N, evaluation)
        within = not single_prompts(evaluation) if within_prompts is None else within_prompts
        coefficients = reward_coefficients(reward_N, evaluation, within_prompts=within)
        gradients |= halves(coefficients, REWARD)
        slope_NS = slopes[0].logprob_NS
        reward_path = reward_slope(
            policy,
            evaluation,
            reward_N,
            Direction(parts={"observed": half}, lr=1.0),
            options,
            within_prompts=within,
            slope_N=torch.where(evaluation.response_NS, slope_NS, 0.0).sum(1),
        )
        reward = by_prompt(
            lambda top, bottom: top / bottom,
            torch.stack([reward_N, torch.ones_like(reward_N)], 1),
            evaluation,
            reward_estimand(policy, prompts=options.prompts, horizon=options.horizon),
        )
    return Slopes(
        gradients=gradients,
        level=level_of_scores(scores, evaluation, estimand),
        reward=reward,
        path=path,
        tangent=rest[0] if rest else None,
        reward_path=reward_path,
    )


def step_shares(
    step: LedgerStep,
    here: Columns,
    there: Columns,
    carried: Columns | None,
    *,
    mode: Mode = "auto",
    microbatch: int = 8,
) -> StepShares:
    """One step of the backward walk: what this batch and this decay did in the whole window.

    Args:
        step: The step, from theta_t.
        here: Gradients at theta_t, by column.
        there: Gradients at theta_{t+1}: the same columns. The column `dH_tangent` of `here` needs
            none.
        carried: rho A_{t+1} of the step after this one; None: this is the window's last.
        mode: How the batch's scores are differentiated.
        microbatch: Rollouts in a pass.

    Returns:
        Shares by token, decay and rest, and the costate for the step before.

    Raises:
        ValueError: If columns do not fit together, or a gradient is not finite.
    """
    policy, batch = step.trained, step.batch
    params = policy.params
    slopes = _along_path(here, there, params)
    if carried is not None and set(carried) != set(slopes):
        raise ValueError(
            f"The costate has columns {sorted(carried)}; expected {sorted(slopes)}, those of the "
            "gradients. Give the shares of the step after this one."
        )
    gradient = loss_gradient(policy, batch, step.objective, microbatch=microbatch)
    rebuilt = step_recursion(
        params, gradient.gradient, step.optimizer, max_grad_norm=step.max_grad_norm
    )
    costates = {name: _costate(rebuilt, s, carried, name) for name, s in slopes.items()}
    inputs = {name: _input(rebuilt, costates[name], s) for name, s in slopes.items()}
    # An optimizer that ascends sees -g: the sign belongs to the direction, the factor to the token.
    signed = [
        {name: rebuilt.parameters[name].sign * x for name, x in direction.items()}
        for direction in inputs.values()
    ]
    how = used_forward_mode(policy, batch.rollouts, mode)
    slope_K = score_slopes(policy, batch.rollouts, signed, mode=how, microbatch=microbatch).slope_K
    scores = Scores(*(inside(x_NS, batch.rollouts.response_NS) for x_NS in gradient.scores))
    coefficient = token_coefficients(step.objective, scores, batch)
    tokens = {
        name: inside(
            -rebuilt.clip_factor
            * (
                coefficient.logprob_NS.double() * slope_K.logprob_NS[k]
                + coefficient.entropy_NS.double() * slope_K.entropy_NS[k]
            ),
            batch.counted_NS,
        )
        for k, name in enumerate(inputs)
    }
    made = _difference(step.after, params)
    check_finite("the step made", made)
    rest = {name: made[name] - one.change for name, one in rebuilt.parameters.items()}
    missed = _missed_moment(rebuilt, step, params)
    size = norm(made)
    clipped = {name: rebuilt.clip_factor * g.double() for name, g in gradient.gradient.items()}
    by_parameter = {
        name: _by_parameter(rebuilt, inputs[name], gradient.gradient) for name in inputs
    }
    return StepShares(
        scores=scores,
        coefficient=coefficient,
        tokens=tokens,
        path={name: _dot(s, made) for name, s in slopes.items()},
        batch={name: sum(parts.values()) for name, parts in by_parameter.items()},
        decay={name: _decay(rebuilt, inputs[name], s, params) for name, s in slopes.items()},
        uncovered={
            name: _dot(s, rest) - (0.0 if carried is None else _dot(missed, carried[name]))
            for name, s in slopes.items()
        },
        momentum_before={
            name: -sum(
                one.rho * float((costates[name][key] * one.before).sum())
                for key, one in rebuilt.parameters.items()
            )
            for name in slopes
        },
        unfinished={name: _unfinished(rebuilt, there.get(name, here[name])) for name in slopes},
        by_parameter=by_parameter,
        carried={
            name: {key: one.rho * costates[name][key] for key, one in rebuilt.parameters.items()}
            for name in slopes
        },
        gradient=clipped,
        step_distance=norm(rest) / size if size else norm(rest),
        gradient_distance=_gradient_distance(rebuilt, clipped, missed),
        clip_factor=rebuilt.clip_factor,
    )


def columns_of(slopes: Slopes, *, tangent: bool = False) -> dict[str, Params]:
    """The columns that `step_shares` takes: both halves, and the tangent, which is their sum."""
    columns = dict(slopes.gradients)
    if tangent:
        first, second = (slopes.gradients[name] for name in ENTROPY)
        columns[TANGENT] = {name: g.double() + second[name].double() for name, g in first.items()}
    return columns


@dataclass(frozen=True, kw_only=True, eq=False)
class RunLedger:
    """A whole run in memory."""

    shares: tuple[StepShares, ...]
    """In the order of the run."""
    slopes: tuple[Slopes, ...]
    """At every checkpoint: one more than steps."""

    @property
    def path(self) -> Estimate:
        """The change of entropy along the path, with an interval by prompt."""
        return combine([(1.0, one.path) for one in self.slopes])

    def total(self, *columns: str) -> float:
        """sum_t s_t.(theta_{t+1} - theta_t) of these columns."""
        return sum(one.path[name] for one in self.shares for name in columns)

    def lines(self, *columns: str) -> dict[str, float]:
        """batches, decay, momentum_before_record, uncovered: they add up to `total`."""
        return {
            "batches": sum(float(x.tokens[name].sum()) for x in self.shares for name in columns),
            "decay": sum(x.decay[name] for x in self.shares for name in columns),
            "momentum_before_record": sum(self.shares[0].momentum_before[n] for n in columns),
            "uncovered": sum(x.uncovered[name] for x in self.shares for name in columns),
        }


def run_ledger(
    steps: Sequence[LedgerStep],
    evaluations: Sequence[tuple[Policy, Rollouts, Tensor | None]],
    options: EstimatorOptions | None = None,
    *,
    tangent: bool = False,
    within_prompts: bool | None = None,
) -> RunLedger:
    """The ledger of a run that fits into memory. `entropy-probe explain` does it from files.

    Args:
        steps: Every optimizer step of the window, in order.
        evaluations: At every checkpoint (one more than steps): the policy there, rollouts drawn
            from it, and their rewards or None.
        options: What entropy is meant, and how it is computed.
        tangent: Also by the slope before each step alone.
        within_prompts: As in `slopes_at`.

    Returns:
        Shares of every step, and the slopes that they are made of.

    Raises:
        ValueError: If the numbers of steps and evaluations do not fit, or only some have rewards.

    Examples:
        >>> import torch
        >>> from entropy_experiments.toy import BigramPolicy
        >>> start, end = BigramPolicy(), BigramPolicy()
        >>> batch = start.update_batch(seed=1)
        >>> adamw = torch.optim.AdamW(start.params.values(), lr=0.02)
        >>> state = read_state(adamw, start.params)
        >>> g = loss_gradient(start, batch, Objective()).gradient
        >>> v = adamw_direction(start.params, g, state)
        >>> end.params["table"].data += 0.02 * v.total["table"]
        >>> step = LedgerStep(
        ...     trained=start, after=end.params, batch=batch, objective=Objective(),
        ...     optimizer=state, max_grad_norm=None,
        ... )
        >>> evaluations = [(p, p.draw(seed=2), None) for p in (start, end)]
        >>> ledger = run_ledger([step], evaluations)
        >>> lines = ledger.lines("dH_a", "dH_b")
        >>> abs(sum(lines.values()) - ledger.path.value) < 1e-12
        True
    """
    options = options or EstimatorOptions()
    if not steps or len(evaluations) != len(steps) + 1:
        raise ValueError(
            f"Got {len(steps)} steps and {len(evaluations)} evaluations; expected one or more "
            "steps, and an evaluation at every checkpoint: one more than steps."
        )
    if len({reward_N is None for *_, reward_N in evaluations}) > 1:
        raise ValueError(
            "Some evaluations have rewards and some have none; expected all or none of them. "
            "Score every checkpoint's rollouts."
        )
    thetas = [*(step.trained.params for step in steps), steps[-1].after]
    slopes = [
        slopes_at(
            policy,
            rollouts,
            reward_N,
            thetas[t - 1] if t else None,
            thetas[t + 1] if t + 1 < len(thetas) else None,
            options,
            tangent=tangent,
            within_prompts=within_prompts,
        )
        for t, (policy, rollouts, reward_N) in enumerate(evaluations)
    ]
    shares: list[StepShares] = []
    carried: Columns | None = None
    for t in reversed(range(len(steps))):
        one = step_shares(
            steps[t],
            columns_of(slopes[t], tangent=tangent),
            slopes[t + 1].gradients,
            carried,
            mode=options.mode,
            microbatch=options.microbatch,
        )
        shares.append(one)
        carried = one.carried
    return RunLedger(shares=tuple(reversed(shares)), slopes=tuple(slopes))


def momentum_shares(
    steps: Iterable[LedgerStep],
    carried: Columns,
    *,
    mode: Mode = "auto",
    microbatch: int = 8,
) -> Iterator[StepShares]:
    """The momentum of one step t, by the batches that it came from.

    A walk in which entropy is asked about at step t alone: the slopes of all earlier steps are 0,
    so batch s keeps rho^(t-s) K_t g_H(t) of the costate, and its tokens add up to its part of

        -K_t g_H(t) . rho m_{t-1}          the ledger's line "momentum"

    What remains after the last of them is its `momentum_before`, and `uncovered` is what stored
    moments have besides the recorded batches.

    Args:
        steps: Earlier steps, the newest first.
        carried: rho K_t g_H(t), by column.
        mode: How scores are differentiated.
        microbatch: Rollouts in a pass.

    Yields:
        Shares of each step, in the same order.
    """
    for step in steps:
        params = step.trained.params
        zero = {
            column: {name: torch.zeros_like(theta) for name, theta in params.items()}
            for column in carried
        }
        shares = step_shares(step, zero, zero, carried, mode=mode, microbatch=microbatch)
        yield shares
        carried = shares.carried


def _half_way(params: Params, before: Params | None, after: Params | None) -> dict[str, Tensor]:
    """1/2 (theta_{t+1} - theta_{t-1}); at an end of the window, half of the one step there is."""
    if before is None and after is None:
        raise ValueError(
            "Neither the parameters before nor those after are known; expected a neighbour: a "
            "window has two checkpoints or more."
        )
    for what, other in (("parameters before", before), ("parameters after", after)):
        if other is not None:
            check_params(what, other, params)
    low, high = before or params, after or params
    return {
        name: 0.5 * (high[name].detach().double() - low[name].detach().double()) for name in params
    }


def _difference(after: Params, before: Params) -> dict[str, Tensor]:
    check_params("parameters after the step", after, before)
    return {name: after[name].detach().double() - x.detach().double() for name, x in before.items()}


def _along_path(here: Columns, there: Columns, params: Params) -> dict[str, dict[str, Tensor]]:
    """s_t by column, in fp64."""
    expected = set(here) - {TANGENT}
    if set(there) != expected:
        raise ValueError(
            f"The gradients after the step have columns {sorted(there)}; expected "
            f"{sorted(expected)}, those before it."
        )
    out: dict[str, dict[str, Tensor]] = {}
    for name, g in here.items():
        check_params(f"gradient {name!r}", g, params)
        if name == TANGENT:
            out[name] = {key: g[key].detach().double() for key in params}
        else:
            other = there[name]
            out[name] = {key: 0.5 * (g[key].double() + other[key].double()) for key in params}
    return out


def _costate(
    rebuilt: StepRecursion, slope: Params, carried: Columns | None, name: str
) -> dict[str, Tensor]:
    """A_t = K_t s_t + rho A_{t+1}."""
    later = None if carried is None else carried[name]
    return {
        key: one.gain * slope[key] + (0.0 if later is None else later[key])
        for key, one in rebuilt.parameters.items()
    }


def _input(rebuilt: StepRecursion, costate: Params, slope: Params) -> dict[str, Tensor]:
    """C_t = alpha A_t + N s_t."""
    return {
        key: one.alpha * costate[key] + one.direct * slope[key]
        for key, one in rebuilt.parameters.items()
    }


def _by_parameter(rebuilt: StepRecursion, direction: Params, gradient: Params) -> dict[str, float]:
    factor = rebuilt.clip_factor
    return {
        key: -factor * one.sign * float((direction[key] * gradient[key].double()).sum())
        for key, one in rebuilt.parameters.items()
    }


def _decay(rebuilt: StepRecursion, direction: Params, slope: Params, params: Params) -> float:
    total = 0.0
    for key, one in rebuilt.parameters.items():
        theta = params[key].detach().double()
        if one.decoupled:
            total -= one.decoupled * float((slope[key] * theta).sum())
        if one.coupled:
            total -= one.coupled * float((direction[key] * theta).sum())
    return total


def _missed_moment(rebuilt: StepRecursion, step: LedgerStep, params: Params) -> dict[str, Tensor]:
    """The moment that training had after the step, minus the rebuilt one, where there is momentum.

    Without it nothing is carried on, and SGD stores no moment to compare with.
    """
    if step.later is None:
        return {}
    stored = first_moment(step.later, params)
    return {name: stored[name] - one.after for name, one in rebuilt.parameters.items() if one.rho}


def _gradient_distance(rebuilt: StepRecursion, clipped: Params, missed: Params) -> float | None:
    if not missed:
        return None
    entered = norm({name: rebuilt.parameters[name].alpha * clipped[name] for name in missed})
    return norm(missed) / entered if entered else norm(missed)


def _unfinished(rebuilt: StepRecursion, slope: Params) -> float:
    return -sum(
        one.later * float((one.gain * slope[key].detach().double() * one.after).sum())
        for key, one in rebuilt.parameters.items()
    )


def _dot(a: Params, b: Params) -> float:
    return sum(float((x * b[name]).sum()) for name, x in a.items())
