"""Steps between two checkpoints made again from their recorded batches, and certified on arrival.

    theta_k (stored) -> gradient of batch k -> our optimizer's step -> theta_{k+1} -> ... -> theta_l

Checkpoints are often sparse while every batch is recorded. The gradients are recomputed, the steps
are `update.recursion`, and what arrives at the next stored checkpoint is compared with it: a replay
that is off by more than ARRIVED of the way between the two is refused. Recorded gradient
fingerprints then name the step that went astray.

A learning rate is the one recorded with the step; without a record, that of both checkpoints where
they agree. Another one would be a guess, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from entropy_experiments.checkpoints.recorded_run import RecordedRun
from entropy_experiments.numerics.derivatives import norm
from entropy_experiments.numerics.sketch import distance, sketch
from entropy_experiments.pipelines.training_facts import with_learning_rate
from entropy_experiments.types import OptimizerState, Params
from entropy_experiments.update.certificate import APART
from entropy_experiments.update.recursion import StepRecursion, advanced, step_recursion

ARRIVED = 0.01
"""Of the way between two checkpoints: far above rounding, far below bf16 or dropout."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayedState:
    """What a step starts from."""

    params: Mapping[str, Tensor]
    optimizer: OptimizerState
    gradient_distance: float | None
    """Of the step that led here, from its recorded fingerprint."""


def replay_step(
    run: RecordedRun,
    step: int,
    params: Params,
    gradient: Params,
    optimizer: OptimizerState,
    *,
    max_grad_norm: float | None,
    next_rate: float | None,
) -> ReplayedState:
    """The state after one step.

    Args:
        run: Whose fingerprints are compared.
        step: Its number.
        params: Before the step.
        gradient: Of its recorded batch, before clipping.
        optimizer: Before the step, with the rate of this step.
        max_grad_norm: Of gradient clipping; None: none.
        next_rate: Learning rate of the step that follows; None: the same.
    """
    made = run.made(step)
    if made is not None and made.without_gradient:
        raise ValueError(
            f"In step {step} of {run.folder} {len(made.without_gradient)} parameters had no "
            f"gradient ({', '.join(made.without_gradient[:3])}); expected a gradient for each: the "
            "optimizer left these alone, which a replay does not follow. Choose a window without "
            "this step (--from, --to)."
        )
    rebuilt = step_recursion(params, gradient, optimizer, max_grad_norm=max_grad_norm)
    moved, state = advanced(params, optimizer, rebuilt)
    if next_rate is not None:
        state = with_learning_rate(state, next_rate)
    return ReplayedState(
        params=moved,
        optimizer=state,
        gradient_distance=None if made is None else _apart(rebuilt, gradient, made.gradient.sketch),
    )


def _apart(rebuilt: StepRecursion, gradient: Params, recorded: Tensor) -> float:
    clipped = {name: rebuilt.clip_factor * g for name, g in gradient.items()}
    return distance(sketch(clipped), recorded)


def learning_rates(
    run: RecordedRun, start: int, end: int, first: float, last: float
) -> list[float]:
    """Of steps start, ..., end - 1: recorded, or the same at both checkpoints.

    Args:
        run: The run.
        start: A stored checkpoint.
        end: The next one.
        first: The rate that `start` stores.
        last: The rate that `end` stores.
    """
    rates = []
    for step in range(start, end):
        made = run.made(step)
        if made is not None:
            rates.append(made.lr)
        elif step == start or first == last:
            rates.append(first)
        else:
            raise ValueError(
                f"The learning rate of step {step} is not recorded: checkpoint {start} stores "
                f"{first:g} and checkpoint {end} {last:g}, and between them is a schedule. Record "
                "training with EntropyProbeCallback(record=...), which keeps every step's rate, or "
                "choose a window of consecutive checkpoints (--from, --to)."
            )
    return rates


def certify_arrival(
    run: RecordedRun,
    start: int,
    end: int,
    before: Params,
    arrived: Params,
    stored: Params,
    gradient_distances: Sequence[float | None],
    *,
    reasons: Callable[[], Sequence[str]] = tuple,
    assumed: Mapping[str, object] | None = None,
) -> float:
    """How far a replay is from the checkpoint where it should be; refused beyond ARRIVED.

    Args:
        run: The run.
        start: Where the replay began.
        end: Where it should arrive.
        before: Parameters at `start`.
        arrived: Where it arrived.
        stored: Parameters at `end`.
        gradient_distances: Of each step's gradient from its fingerprint; None: not recorded.
        reasons: What of training is not followed here.
        assumed: Facts of the step that neither a file nor the config says.

    Returns:
        |arrived - stored| / |stored - before|.
    """

    def apart(a: Params, b: Params) -> float:
        return norm({n: x.detach().double() - b[n].detach().double() for n, x in a.items()})

    way = apart(stored, before)
    missed = apart(arrived, stored) / way if way else apart(arrived, stored)
    if missed <= ARRIVED:
        return missed
    options = list(reasons())
    because = [f"Not followed: {'; '.join(options)}."] if options else []
    if assumed:
        named = ", ".join(f"{name} = {value}" for name, value in assumed.items())
        because.append(
            f"Assumed, since neither a file nor the config says: {named}. If training had others, "
            "give them (--set update.NAME=VALUE, --set sampling.temperature=VALUE)."
        )
    if not because:
        because.append(
            "Every option of the step is recorded or given, and none is known not to be followed: "
            "one may be recorded wrongly."
        )
    raise ValueError(
        f"The replay from checkpoint {start} does not arrive at checkpoint {end} of {run.folder}: "
        f"it is {missed:.1%} of the way between them off, and at most {ARRIVED:.0%} is accepted. "
        f"{_astray(start, gradient_distances)} {' '.join(because)} Or choose a window whose "
        "checkpoints are consecutive (--from, --to), where nothing has to be replayed."
    )


def _astray(start: int, distances: Sequence[float | None]) -> str:
    known = [(start + i, x) for i, x in enumerate(distances) if x is not None]
    if not known:
        return (
            "No gradient fingerprints are recorded (EntropyProbeCallback(record=...) keeps them), "
            "so the step that went astray cannot be named."
        )
    off = next((item for item in known if item[1] > APART), None)
    if off is None:
        step, worst = max(known, key=lambda item: item[1])
        return (
            "Every gradient is near its recorded fingerprint "
            f"(at most {worst:.1g} away, in step {step}): something else moved the parameters."
        )
    return (
        f"The gradient of step {off[0]} is the first that is not the recorded one: it is "
        f"{off[1]:.0%} away from its fingerprint."
    )
