"""One optimizer step, analysed in memory: predicted, measured, and split by cause.

    analysis = analyze_step(policy, optimizer, batch, evaluation, StepOptions(objective=objective))
    print(analysis.ledger)        # momentum, decay, terms of the loss; closes to measured
    analysis.tokens.value_NS      # nats of the step by update token

No files and no model library: a policy is anything with parameters and scores. Neither its
parameters nor the optimizer's state change. The probe inside training calls this on the live
policy; the resumable study calls the same stages (`attribution.step`) and stores each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from entropy_experiments.attribution.ledger import Ledger
from entropy_experiments.attribution.matrix import InfluenceMatrix
from entropy_experiments.attribution.step import (
    FULL,
    RebuiltStep,
    StepOptions,
    close_ledger,
    close_reward_ledger,
    line_columns,
    lines_of_matrix,
    measure_rollouts,
    measure_step,
    most_influential,
    pair_matrix,
    rebuild_step,
    score_evaluation,
    step_inputs,
    token_influences,
)
from entropy_experiments.attribution.terms import line_directions, rollouts_by_line
from entropy_experiments.attribution.tokens import TokenInfluence
from entropy_experiments.estimate.modes import cut_over_ranks, used_forward_mode
from entropy_experiments.numerics.derivatives import How, no_autocast
from entropy_experiments.types import (
    Direction,
    Estimate,
    OptimizerState,
    Params,
    Policy,
    Rollouts,
    UpdateBatch,
)

__all__ = ["StepAnalysis", "StepOptions", "analyze_step"]

SAME_ROLLOUTS = (
    "the evaluation rollouts are those of the update batch, from which the step was learned: "
    "evaluate it on others"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepAnalysis:
    """What one step does to the entropy of the policy, in nats of that step.

    Args:
        rebuilt: The step with its loss, its norms and the update rollouts' scores.
        mode: How derivatives along directions were taken.
        level: Entropy before the step.
        matrix: What each update rollout did, seen by each evaluation rollout.
        tokens: Every update token's influence.
        changes: Measured along the whole step ("full") and its "baseline", by eta.
        rollout_changes: Measured along single update rollouts: see `measure_rollouts`.
        measured_rows: The update rollouts that `rollout_changes` is about.
        ledger: Momentum, decay and the terms of the loss; their sum, the curvature, what was
            measured.
        reward_ledger: The same of the expected reward, where evaluation rollouts have rewards.
        seconds: By stage.

    Examples:
        >>> import torch
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> batch = policy.update_batch(seed=1)
        >>> adamw = torch.optim.AdamW(policy.params.values(), lr=0.02)
        >>> analysis = analyze_step(policy, adamw, batch, policy.draw(seed=2))
        >>> print(analysis.predicted)
        -0.002098  95% [-0.004951, 0.0007542]
        >>> print(analysis.measured)
        -0.002211  95% [-0.005095, 0.0006724]
    """

    rebuilt: RebuiltStep
    mode: How
    level: Estimate
    matrix: InfluenceMatrix
    tokens: TokenInfluence
    changes: Mapping[tuple[str, float], Estimate]
    rollout_changes: Mapping[tuple[str, float], Estimate]
    measured_rows: tuple[int, ...]
    ledger: Ledger
    reward_ledger: Ledger | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def direction(self) -> Direction:
        """The step itself: theta + lr * direction.total."""
        return self.rebuilt.direction

    @property
    def predicted(self) -> Estimate:
        """First order: the sum of the ledger's lines."""
        return self.ledger.predicted

    @property
    def measured(self) -> Estimate:
        """By importance weights, at the step's learning rate."""
        return self.ledger.measured


@no_autocast()
def analyze_step(
    policy: Policy,
    optimizer: OptimizerState | torch.optim.Optimizer,
    batch: UpdateBatch,
    evaluation: Rollouts,
    options: StepOptions | None = None,
    *,
    trained: Policy | None = None,
    reward_N: Tensor | None = None,
) -> StepAnalysis:
    """Predict, measure and attribute the step that `optimizer` would make of `batch`.

    Args:
        policy: Whose entropy it is; parameters as they are before the step.
        optimizer: Adam or AdamW before the step: its state by parameter name, or torch's own, which
            holds the policy's parameters.
        batch: The update batch, with advantages and old log-probs.
        evaluation: Rollouts of `policy` on which entropy is judged; not those of the batch.
        options: How the step was made, and how it is analysed.
        trained: The policy as the loss sees it, where that differs (another temperature).
        reward_N: Rewards of the evaluation rollouts, for the ledger of the expected reward.

    Returns:
        The direction, the entropy before it, the ledger, and the influence of every token and of
        every pair of rollouts.

    Raises:
        ValueError: If the batch makes no step, or the optimizer's groups cannot be served.

    Examples:
        `examples/own_policy.py` does the same with a policy of one's own.

        >>> import torch
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> batch = policy.update_batch(seed=1)
        >>> adamw = torch.optim.AdamW(policy.params.values(), lr=0.02)
        >>> analysis = analyze_step(policy, adamw, batch, policy.draw(seed=2), StepOptions())
        >>> print(analysis.ledger)
        momentum      0  95% [0, 0]
        decay         0.0001151  95% [0.0001083, 0.0001219]
        positive      -0.006255  95% [-0.01704, 0.00453]
        negative      0.004042  95% [-0.005347, 0.01343]
        predicted     -0.002098  95% [-0.004951, 0.0007542]
        curvature     -0.0001144  95% [-0.0001617, -6.707e-05]
        measured      -0.002211  95% [-0.005095, 0.0006724]
        unexplained   1.382e-06  95% [7.869e-07, 1.977e-06]
        >>> analysis.tokens.value_NS.shape  # nats of the step by update token
        torch.Size([32, 5])
    """
    if cut_over_ranks(policy):
        raise ValueError(
            f"A {type(policy).__name__} in analyze_step; expected a whole model on every rank: the "
            "matrix of every pair needs gradients of single rollouts. Study a model cut over ranks "
            "with torchrun -m entropy_experiments.cli influence, or by the stages of "
            "attribution.step."
        )
    step = step_inputs(policy, optimizer, batch, options or StepOptions(), trained=trained)
    options, seconds = step.options, dict[str, float]()
    with _timed(seconds, "step"):
        rebuilt, _ = rebuild_step(step)
    direction = rebuilt.direction
    mode = used_forward_mode(policy, evaluation, options.estimator.mode)

    def lines() -> Mapping[str, Params]:
        return line_directions(
            step.trained,
            batch,
            options.objective,
            direction,
            microbatch=options.estimator.microbatch,
        )

    with _timed(seconds, "base"):
        base = score_evaluation(policy, evaluation, options.estimator)
    with _timed(seconds, "lines"):
        rows_by_line = rollouts_by_line(options.objective, rebuilt.scores, batch)
        columns = line_columns(direction, rows_by_line, lines)
    with _timed(seconds, "matrix"):
        matrix = pair_matrix(step, rebuilt, evaluation, base.scores, columns, folds=options.folds)
    with _timed(seconds, "tokens"):
        tokens = token_influences(
            step, rebuilt, evaluation, base.scores, matrix.g_K, folds=options.folds
        )
    with _timed(seconds, "measured"):
        changes = measure_step(step, rebuilt, evaluation, base.scores, (direction.lr,))
        change = changes[FULL, direction.lr]
    with _timed(seconds, "ledger"):
        by_line = lines_of_matrix(rebuilt, columns, matrix)
        ledger = close_ledger(step, rebuilt, evaluation, base.scores, by_line, change)
    of_reward = None
    if reward_N is not None:
        with _timed(seconds, "reward"):
            of_reward = close_reward_ledger(
                step, rebuilt, evaluation, reward_N, base.scores, columns, matrix, lines
            )
    if evaluation.fingerprint == batch.rollouts.fingerprint:
        ledger = _doubted(ledger, SAME_ROLLOUTS)
        changes = {key: change.doubted(SAME_ROLLOUTS) for key, change in changes.items()}
        of_reward = None if of_reward is None else _doubted(of_reward, SAME_ROLLOUTS)
    rows = most_influential(tokens, options.measured_rollouts)
    rollout_changes: Mapping[tuple[str, float], Estimate] = {}
    if rows:
        with _timed(seconds, "rollouts"):
            rollout_changes = measure_rollouts(
                step,
                rebuilt,
                evaluation,
                base.scores,
                tokens.coefficient,
                rows,
                (direction.lr,),
                noise_floor=change.noise_floor,
            )
    return StepAnalysis(
        rebuilt=rebuilt,
        mode=mode,
        level=base.level,
        matrix=matrix,
        tokens=tokens,
        changes=changes,
        rollout_changes=rollout_changes,
        measured_rows=tuple(rows),
        ledger=ledger,
        reward_ledger=of_reward,
        seconds=seconds,
    )


def _doubted(ledger: Ledger, reason: str) -> Ledger:
    """The same numbers, none of them trusted for this reason."""

    def each(estimates: Mapping[str, Estimate]) -> dict[str, Estimate]:
        return {name: estimate.doubted(reason) for name, estimate in estimates.items()}

    def one(estimate: Estimate | None) -> Estimate | None:
        return None if estimate is None else estimate.doubted(reason)

    return replace(
        ledger,
        lines=each(ledger.lines),
        eventual=each(ledger.eventual),
        predicted=ledger.predicted.doubted(reason),
        curvature=one(ledger.curvature),
        measured=ledger.measured.doubted(reason),
        unexplained=one(ledger.unexplained),
        predicted_by_prompt=one(ledger.predicted_by_prompt),
    )


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - started
