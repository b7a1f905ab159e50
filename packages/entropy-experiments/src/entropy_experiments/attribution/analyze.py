"""One optimizer step, analysed in memory: predicted, measured, and split by cause.

    analysis = analyze_step(policy, optimizer, batch, evaluation, StepOptions(objective=objective))
    print(analysis.ledger)        # momentum, decay, terms of the loss; closes to measured
    analysis.tokens.value_NS      # nats of the step by update token

No files and no model library: a policy is anything with parameters and scores. Neither its
parameters nor the optimizer's state change. Offline studies and the probe inside training add
loading, storing and reporting; the numbers are these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from entropy_experiments.attribution.by_rollout import BLOCK_BYTES
from entropy_experiments.attribution.eventual import momentum_of
from entropy_experiments.attribution.folds import prompt_folds
from entropy_experiments.attribution.ledger import Ledger, entropy_ledger
from entropy_experiments.attribution.matrix import InfluenceMatrix, influence_matrix
from entropy_experiments.attribution.terms import line_directions, rollouts_by_line
from entropy_experiments.attribution.tokens import TokenInfluence, token_influence
from entropy_experiments.estimate.level import entropy_level
from entropy_experiments.estimate.measured import measured
from entropy_experiments.estimate.modes import used_forward_mode
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.types import (
    Direction,
    Estimate,
    OptimizerState,
    Params,
    Policy,
    Rollouts,
    Scores,
    UpdateBatch,
)
from entropy_experiments.types.direction import BASELINE_PARTS
from entropy_experiments.update.adamw import compute_update_vector_adamw
from entropy_experiments.update.gradient import as_trained
from entropy_experiments.update.live import live_state
from entropy_experiments.update.objective import Objective


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How the step was made, and how it is analysed.

    Args:
        objective: The training loss.
        max_grad_norm: Of gradient clipping; None: none.
        estimator: What entropy is meant, and how it is computed.
        folds: Parts of the evaluation prompts whose agreement gives tokens their error bars.
        block_bytes: Memory for gradients of single rollouts.
        clip: Of the measurement's log-weights; None: not clipped.

    Examples:
        >>> StepOptions(objective=Objective(loss="dapo"), max_grad_norm=1.0).objective.loss
        'dapo'
    """

    objective: Objective = field(default_factory=Objective)
    max_grad_norm: float | None = None
    estimator: EstimatorOptions = field(default_factory=EstimatorOptions)
    folds: int = 2
    block_bytes: int = BLOCK_BYTES
    clip: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class StepAnalysis:
    """What one step does to the entropy of the policy, in nats of that step.

    Args:
        direction: The step itself: theta + lr * direction.total.
        level: Entropy before the step.
        ledger: Momentum, decay and the terms of the loss; their sum, the curvature, what was
            measured.
        tokens: Every update token's influence.
        matrix: What each update rollout did, seen by each evaluation rollout.

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

    direction: Direction
    """The step itself: theta + lr * direction.total."""
    level: Estimate
    """Entropy before the step."""
    ledger: Ledger
    """Momentum, decay and the terms of the loss; their sum, the curvature, what was measured."""
    tokens: TokenInfluence
    """Every update token's influence."""
    matrix: InfluenceMatrix
    """What each update rollout did, seen by each evaluation rollout."""

    @property
    def predicted(self) -> Estimate:
        """First order: the sum of the ledger's lines."""
        return self.ledger.predicted

    @property
    def measured(self) -> Estimate:
        """By importance weights, at the step's learning rate."""
        return self.ledger.measured


def analyze_step(
    policy: Policy,
    optimizer: OptimizerState | torch.optim.Optimizer,
    batch: UpdateBatch,
    evaluation: Rollouts,
    options: StepOptions | None = None,
    *,
    trained: Policy | None = None,
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
    options = options or StepOptions()
    estimator, objective = options.estimator, options.objective
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer = live_state(policy.params, optimizer)
    momentum_decay, coupled_decay = momentum_of(optimizer)
    trained = as_trained(policy if trained is None else trained)
    direction, _, stats = compute_update_vector_adamw(
        trained,
        batch,
        objective,
        optimizer,
        max_grad_norm=options.max_grad_norm,
        microbatch=estimator.microbatch,
    )
    scores = stats.found.scores
    base = score_all(policy, policy.params, evaluation, microbatch=estimator.microbatch)
    level = entropy_level(
        policy,
        evaluation,
        form=estimator.form,
        unit=estimator.unit,
        entropy=estimator.entropy,
        prompts=estimator.prompts,
        horizon=estimator.horizon,
        microbatch=estimator.microbatch,
        base=base,
    )
    estimand = estimator.estimand(policy)
    mode = used_forward_mode(policy, evaluation, estimator.mode)
    columns = own_columns(trained, batch, objective, direction, scores, estimator.microbatch)
    matrix = influence_matrix(
        policy,
        evaluation,
        trained,
        batch,
        objective,
        direction,
        estimand=estimand,
        microbatch=estimator.microbatch,
        block_bytes=options.block_bytes,
        base=base,
        scores=scores,
        extra=columns.directions,
        fold_N=prompt_folds(evaluation, options.folds),
    )
    tokens = token_influence(
        policy,
        evaluation,
        trained,
        batch,
        objective,
        direction,
        estimand=estimand,
        folds=options.folds,
        mode=mode,
        microbatch=estimator.microbatch,
        base=base,
        scores=scores,
        gradients=matrix.g_K,
    )
    change = measured(
        policy,
        evaluation,
        direction,
        direction.lr,
        form=estimator.form,
        unit=estimator.unit,
        entropy=estimator.entropy,
        prompts=estimator.prompts,
        horizon=estimator.horizon,
        microbatch=estimator.microbatch,
        clips=(options.clip,),
        base=base,
        repackings=estimator.repackings,
    )
    ledger = entropy_ledger(
        policy,
        evaluation,
        trained,
        batch,
        objective,
        direction,
        momentum_decay=momentum_decay,
        coupled_decay=coupled_decay,
        form=estimator.slope_form,
        mode=mode,
        unit=estimator.unit,
        entropy=estimator.entropy,
        prompts=estimator.prompts,
        horizon=estimator.horizon,
        microbatch=estimator.microbatch,
        base=base,
        lines={
            name: direction.lr * matrix.slope(*of_line)
            for name, of_line in columns.of_lines.items()
        },
        measured=change,
    )
    return StepAnalysis(
        direction=direction, level=level, ledger=ledger, tokens=tokens, matrix=matrix
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class LineColumns:
    """How the ledger's lines are read off the matrix."""

    directions: Mapping[str, Params]
    """Lines that are no sums of update rollouts: columns of their own."""
    of_lines: Mapping[str, Sequence[int | str]]
    """By line: the columns that add up to it."""


def own_columns(
    trained: Policy,
    batch: UpdateBatch,
    objective: Objective,
    direction: Direction,
    scores: Scores,
    microbatch: int,
) -> LineColumns:
    """Where no rollout is in two lines of the ledger, a line is a sum of rollouts' columns."""
    by_line = rollouts_by_line(objective, scores, batch)
    if by_line is None:
        own = line_directions(trained, batch, objective, direction, microbatch=microbatch)
    else:
        own = {name: direction.parts[name] for name in BASELINE_PARTS if name in direction.parts}
    of_lines: dict[str, Sequence[int | str]] = {name: [name] for name in own}
    return LineColumns(directions=own, of_lines={**of_lines, **(by_line or {})})
