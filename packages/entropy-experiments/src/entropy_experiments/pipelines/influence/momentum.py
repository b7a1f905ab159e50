"""Whose momentum? The ledger's line "momentum", split among the earlier batches it came from.

    m_{t-1} = sum_s (1 - b1) b1^(t-1-s) c_s g_s + b1^(...) m_before

A run that recorded its batches knows every g_s: they are recomputed at the parameters of their own
step, stored or replayed, and one jvp along b1^(t-s) (1 - b1) K_t g_H(t) gives each token of each
batch (`attribution.run_ledger.momentum_shares`). What precedes the first batch (`earlier_steps`)
is one line, and so is what the rebuilt batches do not cover; the lines add up to the ledger's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from entropy_experiments.artifacts import digest_of
from entropy_experiments.attribution.eventual import momentum_of
from entropy_experiments.attribution.run_ledger import (
    ENTROPY,
    LedgerStep,
    momentum_shares,
)
from entropy_experiments.estimate.first_order import scores_along, slope_of_scores
from entropy_experiments.estimate.modes import used_forward_mode
from entropy_experiments.pipelines.influence.earlier_steps import EarlierSteps, record_digests
from entropy_experiments.pipelines.influence.stages import Evaluation
from entropy_experiments.pipelines.influence.store import Stage
from entropy_experiments.pipelines.run_ledger.files import table_bytes
from entropy_experiments.pipelines.run_ledger.rows import token_columns
from entropy_experiments.pipelines.run_ledger.stages import LedgerStages
from entropy_experiments.pipelines.run_ledger.states import RunState, RunStates
from entropy_experiments.results import JSONObject, finite
from entropy_experiments.results.run_ledger import TOKEN_TABLE
from entropy_experiments.types import AdamGroup, Estimate, OptimizerState, Params
from entropy_experiments.types.estimate import combine
from entropy_experiments.update.certificate import APART
from entropy_experiments.update.recursion import first_moment

ROWS = "rows"
"""Name of the tensor that holds momentum.parquet."""
SINGLE = 3
"""So few batches have a line each."""
ROUNDING = 0.01
"""Of the sum of |parts|: how far their sum may be from the line, in fp32 and by differences."""


def momentum_stage(evaluation: Evaluation, earlier: EarlierSteps, line: float) -> Stage:
    """Facts for summary.json, and the rows of momentum.parquet.

    Args:
        evaluation: By whose rollouts entropy is meant.
        earlier: The batches.
        line: The ledger's line "momentum", which is split.

    Raises:
        ValueError: If an earlier state cannot be had, or the parts do not add up to the line.
        OSError: If an earlier file cannot be read.
    """
    study = evaluation.study
    record = record_digests(
        study.probe.checkpoint.path, earlier.window.end, len(earlier.window.steps)
    )
    # Replayed states are of these batches, and no others' are taken for them.
    own_key = digest_of(evaluation.key, list(earlier.window.anchors), record)
    stages = LedgerStages(store=study.store, key=own_key)
    states = RunStates(
        config=study.config, run=earlier.run, window=earlier.window, stages=stages, say=None
    )
    key = [
        *("momentum", earlier.first, list(earlier.window.anchors), study.mode, line),
        record,
    ]
    passes = earlier.passes * len(study.probe.update.rollouts) / len(evaluation.rollouts)
    replayed = (
        *(f"state_{step}" for step in earlier.window.checkpoints),
        *(f"replay_{step}" for step in earlier.window.anchors),
    )
    try:
        stage = evaluation.stage(
            "momentum", key, passes, lambda: _split(evaluation, states, earlier, line)
        )
    except ValueError:
        stages.remove(*replayed)  # of no use to anybody; a kill leaves them, to go on from
        raise
    stages.remove(*replayed)
    return stage


def _split(evaluation: Evaluation, states: RunStates, earlier: EarlierSteps, line: float) -> Stage:
    study, step = evaluation.study, earlier.window.end
    b1, _ = momentum_of(study.probe.optimizer)
    signs = _signs(evaluation.probe.optimizer)
    gain = _gain(evaluation, signs)
    visited: list[RunState] = []
    walked = momentum_shares(
        _steps(evaluation, states, earlier, visited),
        _carried(evaluation, gain, b1),
        mode=study.mode,
        microbatch=study.probe.estimator.microbatch,
    )
    rows, batches, slopes, last, measured = [], [], [], None, 0.0
    for shares in walked:
        state = visited[-1]
        batch, _, _ = states.batch(state)
        decode = state.probed.checkpoint.tokenizer.decode
        rows.append(token_columns(state.step, batch, shares, decode))
        entered = {name: (1 - b1) * signs[name] * g for name, g in shares.gradient.items()}
        slope = _slope(evaluation, gain, b1 ** (step - state.step), entered)
        slopes.append(slope)
        distance = shares.gradient_distance
        batches.append(
            {
                "step": state.step,
                "weight": (1 - b1) * b1 ** (step - state.step),
                **_bar(slope, sum(float(shares.tokens[name].sum()) for name in ENTROPY)),
                "decay": sum(shares.decay[name] for name in ENTROPY),
                "step_distance": shares.step_distance,
                "gradient_distance": distance,
                "other_gradient": distance is not None and distance > APART,
            }
        )
        measured += sum(shares.uncovered[name] for name in ENTROPY)
        last = shares
    assert last is not None  # there is an earlier step
    first = first_moment(visited[-1].optimizer, visited[-1].params)
    before = _bar(
        _slope(evaluation, gain, b1 ** (step - earlier.first + 1), first),
        sum(last.momentum_before[name] for name in ENTROPY),
    )
    decay = math.fsum(one["decay"] for one in batches)
    known = math.fsum([*(one["dH"] for one in batches), before["dH"], decay])
    _check_sum(line, line - known, measured, [one["dH"] for one in batches])
    table = table_bytes(TOKEN_TABLE, *reversed(rows))
    return Stage(
        facts={
            "from": earlier.first,
            "to": step,
            "total": line,
            "batches": batches,
            "parts": _parts(batches, slopes),
            "before_record": before,
            "decay": decay,
            "uncovered": line - known,
        },
        tensors={ROWS: torch.frombuffer(bytearray(table), dtype=torch.uint8)},
    )


def _parts(batches: Sequence[JSONObject], slopes: Sequence[Estimate]) -> list[JSONObject]:
    """The newest batches, which hold half of the weight, and the others; a few are single."""
    half, sums, cuts = sum(one["weight"] for one in batches) / 2, 0.0, [0, len(batches)]
    for count, one in enumerate(batches, start=1):
        sums += one["weight"]
        if sums >= half:
            cuts = sorted({0, count, len(batches)})
            break
    if len(batches) <= SINGLE:
        cuts = list(range(len(batches) + 1))
    return [
        {
            "from": batches[high - 1]["step"],
            "to": batches[low]["step"],
            **_bar(
                combine([(1.0, slope) for slope in slopes[low:high]]),
                math.fsum(one["dH"] for one in batches[low:high]),
            ),
        }
        for low, high in pairwise(cuts)
    ]


def _slope(evaluation: Evaluation, gain: Params, weight: float, entered: Params) -> Estimate:
    """What a part of the moment does to the entropy in this step, with an error bar by prompt."""
    study = evaluation.study
    direction = {name: -weight * gain[name] * x for name, x in entered.items()}
    mode = used_forward_mode(study.policy, evaluation.rollouts, study.mode)
    microbatch = study.probe.estimator.microbatch
    scores, (slope,) = scores_along(
        study.policy, evaluation.rollouts, [direction], mode=mode, microbatch=microbatch, lr=1.0
    )
    return slope_of_scores(scores, slope, evaluation.rollouts, study.estimand, mode=mode)


def _bar(estimate: Estimate, value: float) -> JSONObject:
    """The value that tokens add up to, with the estimate's error."""
    interval = None if estimate.interval is None else list(estimate.interval)
    return {"dH": value, "stderr": finite(estimate.stderr), "interval": interval}


def _check_sum(line: float, uncovered: float, measured: float, parts: Sequence[float]) -> None:
    """What the batches leave of the line is what the stored moments say they leave."""
    size = math.fsum(abs(part) for part in (*parts, line))
    if abs(uncovered - measured) > ROUNDING * size:
        raise ValueError(
            f"the batches leave {uncovered:+.3g} of the line's {line:+.3g} nats, and the stored "
            f"moments say {measured:+.3g}: their tokens are not derivatives of this line"
        )


def _steps(
    evaluation: Evaluation, states: RunStates, earlier: EarlierSteps, visited: list[RunState]
) -> Iterator[LedgerStep]:
    """Earlier steps, the newest first; their models are opened one after the other."""
    after: Params = evaluation.study.policy.params
    later: OptimizerState = evaluation.probe.optimizer
    for step in reversed(earlier.steps):
        state = states.at(step)
        visited.append(state)
        batch, facts, trained = states.batch(state)
        yield LedgerStep(
            trained=trained,
            after=after,
            batch=batch,
            objective=facts.objective,
            optimizer=state.optimizer,
            max_grad_norm=facts["max_grad_norm"] or None,
            later=later,
        )
        after = {name: theta.detach().clone() for name, theta in state.params.items()}
        later = state.optimizer


def _signs(optimizer: OptimizerState) -> dict[str, float]:
    """-1 where the optimizer ascends."""
    return {
        name: -1.0 if isinstance(group, AdamGroup) and group.maximize else 1.0
        for group in optimizer.groups
        for name in group.names
    }


def _gain(evaluation: Evaluation, signs: Mapping[str, float]) -> dict[str, Tensor]:
    """K_t = lr P / (1 - b1): what a moment is multiplied by in this step."""
    direction = evaluation.study.direction
    assert direction.preconditioner is not None  # an AdamW step has one
    b1, _ = momentum_of(evaluation.probe.optimizer)
    return {
        name: direction.lr / (1 - b1) * signs[name] * p.double()
        for name, p in direction.preconditioner.items()
    }


def _carried(evaluation: Evaluation, gain: Params, b1: float) -> dict[str, Params]:
    """rho K_t g_H(t) in two halves: the folds of E in two groups."""
    assert evaluation.matrix is not None  # the momentum of a cut model is one line
    gradients = evaluation.matrix.g_K
    middle = max(1, len(gradients) // 2)
    halves = (gradients[:middle], gradients[middle:])
    return {
        column: {
            name: b1
            * k
            * sum((g[name].double() for g in half), torch.zeros_like(k, dtype=torch.float64))
            for name, k in gain.items()
        }
        for column, half in zip(ENTROPY, halves, strict=True)
    }
