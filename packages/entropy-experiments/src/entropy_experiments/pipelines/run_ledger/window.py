"""Which part of a recorded run a ledger is about, and which of its checkpoints are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from entropy_experiments.checkpoints.recorded_run import RecordedRun


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    """What part of a run is explained, and how.

    Args:
        start: First checkpoint of the window; None: the run's first.
        end: Last one; None: the run's last.
        every: Read every so many checkpoints and replay the steps between.
        tangent: Also by the slope before each step alone.
        responses: Of each evaluation prompt at each checkpoint; two or more compare rewards within
            prompts, which has less noise.
        training_prompts: Evaluate on the run's own prompts, where it has no others.

    Raises:
        ValueError: If a number is out of range.

    Examples:
        >>> ExplainOptions(start=10, end=20, every=5).responses
        2
    """

    start: int | None = None
    end: int | None = None
    every: int = 1
    tangent: bool = False
    responses: int = 2
    training_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("every", "responses"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1.")
        if self.start is not None and self.end is not None and self.start >= self.end:
            raise ValueError(
                f"The window is from checkpoint {self.start} to {self.end}; expected its end after "
                "its start."
            )


@dataclass(frozen=True, kw_only=True)
class Window:
    """Checkpoints from `start` to `end`; those of `anchors` are read, the others replayed."""

    start: int
    end: int
    anchors: tuple[int, ...]

    @property
    def steps(self) -> range:
        return range(self.start, self.end)

    @property
    def checkpoints(self) -> range:
        """Those that are visited: one more than steps."""
        return range(self.start, self.end + 1)

    def segment(self, step: int) -> tuple[int, int]:
        """The stored checkpoints around a replayed one."""
        return (
            max(a for a in self.anchors if a <= step),
            min(a for a in self.anchors if a > step),
        )


def find_window(run: RecordedRun, options: ExplainOptions) -> Window:
    """The window, all of whose batches are recorded.

    Args:
        run: The run.
        options: Which part of it.

    Returns:
        Its ends and the checkpoints that are read.

    Raises:
        ValueError: If an end is no checkpoint, or a batch is missing.
    """
    stored = sorted(run.checkpoints)
    start = stored[0] if options.start is None else options.start
    end = stored[-1] if options.end is None else options.end
    for name, step in (("--from", start), ("--to", end)):
        if step not in run.checkpoints:
            near = min(stored, key=lambda s: abs(s - step))
            raise ValueError(
                f"{name} is {step}, and {run.folder} has no checkpoint of that step; expected one "
                f"of {_few(stored)}. The nearest is {near}."
            )
    if start >= end:
        raise ValueError(
            f"The window of {run.folder} is from checkpoint {start} to {end}; expected two "
            "checkpoints or more, the end after the start."
        )
    missing = [step for step in range(start, end) if run.batch(step) is None]
    if missing:
        whole = max((s for s in stored if s <= missing[0]), default=start)
        advice = f" Checkpoints {start} to {whole} are complete (--to {whole})."
        raise ValueError(
            f"{len(missing)} of {end - start} steps of {run.folder} have no recorded batch (the "
            f"first is step {missing[0]}); expected update_batch/ for each, as "
            "EntropyProbeCallback(record=...) or run_ledger=True keeps it."
            f"{advice if whole > start else ''}"
        )
    kept = [s for s in stored if start <= s <= end and (s - start) % options.every == 0]
    return Window(start=start, end=end, anchors=tuple(sorted({start, *kept, end})))


def _few(numbers: Sequence[int]) -> str:
    if len(numbers) <= 8:
        return ", ".join(map(str, numbers))
    return f"{', '.join(map(str, numbers[:4]))}, ..., {numbers[-1]}"
