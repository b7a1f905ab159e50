"""Which earlier batches the momentum of a step can be split among, and what that costs.

The batches must be recorded, and the state before each of them stored or replayed from a stored
checkpoint. Without a number of batches from the user, the reach is what costs no more than the rest
of the study, at least LEAST batches, and no more than hold all but LEFT of the momentum's weight
(b1 = 0.9: 29), or MOST. No more steps are replayed on the way to the first
batch than there are batches, and no more states kept on disk than STATES_BYTES. A number from the
user replays whatever it needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from torch import Tensor

from entropy_experiments.artifacts import sha256
from entropy_experiments.attribution.eventual import momentum_of
from entropy_experiments.checkpoints.recorded_run import RecordedRun, find_run
from entropy_experiments.estimate.modes import cut_over_ranks
from entropy_experiments.pipelines.probe_inputs import ProbeInputs
from entropy_experiments.pipelines.run_ledger.window import Window
from entropy_experiments.types import OptimizerState, Params

LEAST, MOST = 3, 30
"""Batches, where the user gives no number."""
LEFT = 0.05
"""Of the momentum's weight: what may stay with batches before the first one."""
SPLIT = 8
"""Passes over an earlier batch: its gradient (3), and derivatives along two directions (5)."""
STATES_BYTES = 8 << 30
"""Of replayed states on disk, where the user gives no number."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EarlierSteps:
    """The steps from `first` up to the one whose momentum is split."""

    run: RecordedRun
    window: Window
    """From a stored checkpoint, where a replay may begin before `first`."""
    first: int

    @property
    def steps(self) -> range:
        return range(self.first, self.window.end)

    @property
    def passes(self) -> int:
        """Over one batch: SPLIT for each, and a gradient for each step that is replayed."""
        replayed = sum(b - a for a, b in pairwise(self.window.anchors) if b > a + 1)
        return SPLIT * len(self.steps) + 3 * replayed


def earlier_steps(
    run: RecordedRun,
    step: int,
    count: int,
    *,
    most_replayed: int | None = None,
    most_between: int | None = None,
) -> EarlierSteps:
    """The last `count` recorded steps before one, and the checkpoints that lead to them.

    Args:
        run: The run.
        step: Whose momentum is split.
        count: How many batches at most.
        most_replayed: Steps that may be replayed before the first batch; None: any number.
        most_between: Steps that may lie between two stored checkpoints; None: any number.

    Raises:
        ValueError: If no earlier batch is recorded, or no checkpoint leads to one.
    """
    first = step
    while first > max(step - count, 0) and run.batch(first - 1) is not None:
        first -= 1
    if first == step:
        raise ValueError(
            f"the batch of step {step - 1} is not recorded in {run.folder.name} (update_batch/ "
            "beside its checkpoint, or in the record of EntropyProbeCallback(run_ledger=True))"
        )
    start = _start(run, first)
    if start is None or (most_replayed is not None and first - start > most_replayed):
        start = first = min((c for c in run.checkpoints if first <= c < step), default=step)
    anchors = [c for c in sorted(run.checkpoints) if start <= c < step] + [step]
    if most_between is not None:
        while len(anchors) > 1 and max(b - a for a, b in pairwise(anchors)) > most_between:
            del anchors[0]
        start, first = anchors[0], max(first, anchors[0])
    if first == step:
        near = max((c for c in run.checkpoints if c < step), default=None)
        reach = "there is none" if near is None else f"the nearest is checkpoint {near}"
        raise ValueError(
            f"no stored checkpoint leads to the batches before step {step} at a bearable cost: "
            f"{reach} ({_advice(near, step)})"
        )
    window = Window(start=start, end=step, anchors=tuple(anchors))
    return EarlierSteps(run=run, window=window, first=first)


def _advice(near: int | None, step: int) -> str:
    if near is None:
        return "keep checkpoints before this one"
    return f"--momentum {step - near} replays the {step - near} steps from there"


def _start(run: RecordedRun, first: int) -> int | None:
    """The last checkpoint at or before a step from which every batch is recorded."""
    at = first
    while at not in run.checkpoints:
        if at <= 0 or run.batch(at - 1) is None:
            return None
        at -= 1
    return at


def steps_of_study(probe: ProbeInputs, count: int | None, budget: float) -> EarlierSteps | None:
    """The batches that hold a step's momentum; None: it has none.

    Args:
        probe: The step. Its own batch is not needed: momentum is older.
        count: How many batches at most; None: as many as matter, at a bearable cost.
        budget: Passes over the update batch that the rest of the study costs.

    Raises:
        ValueError: If it cannot be split; the message says why in one sentence.
    """
    b1, _ = momentum_of(probe.optimizer)
    if not b1 or not _moved(probe.optimizer):
        return None
    if cut_over_ranks(probe.policy):
        raise ValueError(
            "earlier checkpoints are opened whole, and this model is cut over the processes "
            "(checkpoint.sharding)"
        )
    if count is None and not probe.real:
        raise ValueError(
            "training did not make this step, its batch was drawn here (--momentum N splits its "
            "momentum all the same)"
        )
    run, step = run_of(probe.checkpoint.path, probe.checkpoint.step)
    if run is None or step is None:
        raise ValueError(
            f"{probe.checkpoint.name} is no numbered checkpoint of a run (checkpoint-N beside "
            "the earlier ones)"
        )
    if count is not None:
        return earlier_steps(run, step, count)
    enough = math.ceil(math.log(LEFT) / math.log(b1))
    reach = min(MOST, enough, max(LEAST, int(budget // SPLIT)))
    between = STATES_BYTES // _state_bytes(probe.policy.params, probe.optimizer)
    return earlier_steps(run, step, reach, most_replayed=reach, most_between=max(1, between))


def run_of(path: Path, step: int | None) -> tuple[RecordedRun | None, int | None]:
    """The run that a checkpoint belongs to; None: to none that can be read."""
    try:
        run = find_run(path.parent)
    except (FileNotFoundError, ValueError):
        return None, None
    if step is None or run.checkpoints.get(step) != path:
        return None, None
    return run, step


def record_digests(path: Path, step: int | None, count: int | None) -> dict[str, list[str]]:
    """Contents of the earlier batches, by step, and the checkpoints that lead to them: what a split
    depends on beside the study."""
    run, step = run_of(path, step)
    if run is None or step is None:
        return {}
    first = max(step - (MOST if count is None else count), 0)
    folders = {s: run.batch(s) for s in range(first, step)}
    batches = {
        str(s): [f"{p.name} {sha256(p)}" for p in sorted(folder.iterdir()) if p.is_file()]
        for s, folder in folders.items()
        if folder is not None
    }
    return {**batches, "checkpoints": [str(s) for s in sorted(run.checkpoints) if s < step]}


def _moved(optimizer: OptimizerState) -> bool:
    return any(
        isinstance(moment := entry.get("exp_avg"), Tensor) and bool(moment.any())
        for entry in optimizer.state.values()
    )


def _state_bytes(params: Params, optimizer: OptimizerState) -> int:
    moments = (value for entry in optimizer.state.values() for value in entry.values())
    return sum(x.nbytes for x in (*params.values(), *moments) if isinstance(x, Tensor))
