"""Whose momentum? The ledger's line "momentum", split among the earlier batches it came from.

    m_{t-1} = sum_s (1 - b1) b1^(t-1-s) c_s g_s + b1^(...) m_before

A run that recorded its batches knows every g_s: they are recomputed at the parameters of their own
step, stored or replayed, and one jvp along b1^(t-s) (1 - b1) K_t g_H(t) gives each token of each
batch (`attribution.run_ledger.momentum_shares`). What precedes the record, or the number of
batches asked for, stays one line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from entropy_experiments.attribution.eventual import momentum_of
from entropy_experiments.attribution.run_ledger import (
    ENTROPY,
    LedgerStep,
    momentum_shares,
)
from entropy_experiments.checkpoints.recorded_run import RecordedRun, find_run
from entropy_experiments.pipelines.influence.stages import Evaluation
from entropy_experiments.pipelines.influence.store import Stage
from entropy_experiments.pipelines.run_ledger.files import table_bytes
from entropy_experiments.pipelines.run_ledger.rows import token_columns
from entropy_experiments.pipelines.run_ledger.stages import LedgerStages
from entropy_experiments.pipelines.run_ledger.states import RunState, RunStates
from entropy_experiments.pipelines.run_ledger.window import Window
from entropy_experiments.results.run_ledger import TOKEN_TABLE
from entropy_experiments.types import AdamGroup, OptimizerState, Params

ROWS = "rows"
"""Name of the tensor that holds momentum.parquet."""


def momentum_stage(evaluation: Evaluation) -> Stage:
    """Facts for summary.json, and the rows of momentum.parquet."""
    study, probe = evaluation.study, evaluation.probe
    count = study.momentum_batches

    def compute() -> Stage:
        if not probe.real:
            raise ValueError(
                "The momentum of a hypothetical step: its batch was drawn here. Expected the batch "
                "that training recorded (data.update_rollouts: recorded)."
            )
        run = find_run(probe.checkpoint.path.parent)
        step = probe.checkpoint.step
        if step is None or run.checkpoints.get(step) != probe.checkpoint.path:
            raise ValueError(
                f"{probe.checkpoint.path} is no numbered checkpoint of a run; expected "
                "checkpoint-N beside the earlier ones."
            )
        window = earlier_window(run, step, count)
        states = RunStates(
            config=study.config,
            run=run,
            window=window,
            stages=LedgerStages(store=study.store, key=evaluation.key),
            say=study.clock.say,
        )
        return _split(evaluation, states)

    return evaluation.stage("momentum", ["momentum", count, study.mode], 6 * count, compute)


def earlier_window(run: RecordedRun, step: int, count: int) -> Window:
    """The last `count` recorded steps before one, from a stored checkpoint on.

    Args:
        run: The run.
        step: Whose momentum is asked about.
        count: How many batches at most.

    Returns:
        Its start is the earliest checkpoint from which on every batch is recorded.
    """
    recorded = step
    while recorded > step - count and run.batch(recorded - 1) is not None:
        recorded -= 1
    starts = [c for c in sorted(run.checkpoints) if recorded <= c < step]
    if not starts:
        raise ValueError(
            f"Nothing recorded leads to checkpoint {step} of {run.folder}: expected an earlier "
            f"checkpoint, at most {count} steps before it, and update_batch/ of every step between."
        )
    anchors = [c for c in sorted(run.checkpoints) if starts[0] <= c <= step]
    return Window(start=starts[0], end=step, anchors=tuple(anchors))


def _split(evaluation: Evaluation, states: RunStates) -> Stage:
    study, window = evaluation.study, states.window
    b1, _ = momentum_of(study.probe.optimizer)
    parts, batches, last = [], [], None
    visited: list[RunState] = []
    carried = _carried(evaluation, b1)
    walked = momentum_shares(
        _steps(evaluation, states, visited),
        carried,
        mode=study.mode,
        microbatch=study.probe.estimator.microbatch,
    )
    for shares in walked:
        state = visited[-1]
        batch, _, _ = states.batch(state)
        decode = state.probed.checkpoint.tokenizer.decode
        parts.append(token_columns(state.step, batch, shares, decode))
        batches.append(
            {
                "step": state.step,
                "weight": (1 - b1) * b1 ** (window.end - state.step),
                **_halves({name: float(shares.tokens[name].sum()) for name in ENTROPY}),
                "decay": sum(shares.decay[name] for name in ENTROPY),
                "uncovered": sum(shares.uncovered[name] for name in ENTROPY),
                "step_distance": shares.step_distance,
            }
        )
        last = shares
    assert last is not None  # a window has steps
    rows = table_bytes(TOKEN_TABLE, *reversed(parts))
    total = evaluation.tokens.baseline["momentum"]
    before = _halves(last.momentum_before)
    return Stage(
        facts={
            "from": window.start,
            "to": window.end,
            "total": total,
            "batches": batches,
            "before_record": before,
            "decay": sum(one["decay"] for one in batches),
            "uncovered": sum(one["uncovered"] for one in batches),
        },
        tensors={ROWS: torch.frombuffer(bytearray(rows), dtype=torch.uint8)},
    )


def _steps(
    evaluation: Evaluation, states: RunStates, visited: list[RunState]
) -> Iterator[LedgerStep]:
    """Earlier steps, the newest first; their models are opened one after the other."""
    after: Params = evaluation.study.policy.params
    later: OptimizerState = evaluation.probe.optimizer
    for step in reversed(states.window.steps):
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


def _carried(evaluation: Evaluation, b1: float) -> dict[str, Params]:
    """rho K_t g_H(t) in two halves: K = lr P / (1 - b1), and the folds of E in two groups."""
    assert evaluation.matrix is not None  # a study of a cut model is refused at its start
    study, gradients = evaluation.study, evaluation.matrix.g_K
    direction = study.direction
    assert direction.preconditioner is not None  # an AdamW step has one
    signs = {
        name: -1.0 if isinstance(group, AdamGroup) and group.maximize else 1.0
        for group in evaluation.probe.optimizer.groups
        for name in group.names
    }
    middle = max(1, len(gradients) // 2)
    halves = (gradients[:middle], gradients[middle:])
    scale = direction.lr * b1 / (1 - b1)
    return {
        column: {
            name: scale
            * signs[name]
            * p.double()
            * sum((g[name].double() for g in half), torch.zeros_like(p, dtype=torch.float64))
            for name, p in direction.preconditioner.items()
        }
        for column, half in zip(ENTROPY, halves, strict=True)
    }


def _halves(columns: Mapping[str, float]) -> dict[str, float]:
    a, b = (columns[name] for name in ENTROPY)
    return {"dH": a + b, "stderr": abs(a - b)}
