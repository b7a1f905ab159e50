"""Progress of a study: what is done, how long the rest may take. A bar on a terminal, else lines.

Time left = (rollouts still to pass through the model) x (seconds per rollout so far). A stage that
was found on disk counts with the seconds that it took when it was made.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WORDS = {
    "step": "the optimizer step",
    "lines": "the step by lines of the ledger",
    "base": "entropy before the step",
    "matrix": "every pair of rollouts",
    "tokens": "influence of every token",
    "measured": "changes measured along the step",
    "ledger": "ledger of the entropy",
    "reward": "ledger of the reward",
    "rollouts": "changes measured along single rollouts, part {}",
    "without": "the step without rollout {}",
    "confirm": "a what-if's step, made and measured",
    "fisher": "Fisher kernel",
}
_NAME = re.compile(r"(?:(eval_\d+)_)?([a-z]+)(?:_(\d+))?")


def in_words(name: str) -> str:
    """A stage's name as people would say it: eval_00_rollouts_01, measured along ..., part 2."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    batch, kind, number = match.groups()
    assert kind in WORDS, name
    # Parts are counted from 1; rollouts have their own numbers, which begin with 0.
    said = WORDS[kind].format(int(number or 0) + (kind == "rollouts"))
    return said if batch is None else f"{batch}, {said}"


@dataclass(kw_only=True)
class Clock:
    """Says what is done and how long the rest may take, by the passes that stages cost."""

    say: Callable[[str], None] | None
    total: float = 0.0
    """Rollouts that all planned stages pass through the model, forward and back."""
    done: float = 0.0
    seconds: float = 0.0
    _bar: Any = None
    _task: Any = None

    def tell(self, name: str, cost: float, seconds: float, *, found: bool) -> None:
        self.done += cost
        self.seconds += seconds
        if self.say is None:
            return
        left = max(self.total - self.done, 0.0) * self.seconds / self.done if self.done else 0.0
        rest = f", about {left:.0f} s left" if left >= 1 else ""
        what = "kept from before" if found else f"{seconds:.1f} s"
        share = min(self.done / max(self.total, 1), 1)
        if not sys.stderr.isatty():
            self.say(f"{in_words(name)}: {what} ({share:.0%}{rest})")
            return
        if self._bar is None:
            self._bar, self._task = _opened()
        self._bar.update(
            self._task, completed=share, description=f"{in_words(name)}: {what}", rest=rest
        )

    def close(self) -> None:
        """Leave the terminal as it was; the last state of the bar stays on it."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _opened() -> tuple[Any, Any]:
    from rich import progress as rich
    from rich.console import Console

    bar = rich.Progress(
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.TextColumn("{task.description}{task.fields[rest]}", markup=False),
        console=Console(stderr=True),
    )
    bar.start()
    return bar, bar.add_task("", total=1.0, rest="")
