"""What an adapter is given and gives back."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NO_GRADIENT = (1, 2, 3, 4, 5, 9, 10, 11)
ZERO_GRADIENT = (20,)
UNCHANGED = (4, 21)
EXPLODING = (22,)
NOT_FINITE = (27,)

# What torch itself says, in its errors and warnings.
TORCH_SAYS: tuple[tuple[str, tuple[int, ...]], ...] = (
    (r"does not require grad and does not have a grad_fn", (1, 2, 3, 4)),
    (r"backward through the graph a second time", (12, 14)),
    (r"modified by an inplace operation", (13, 14)),
    (r"unscale FP16 gradients", (15,)),
    (r"None of the inputs have requires_grad", (11,)),
    (r"target size .* different to the input size", (18,)),
    (r"size of tensor a .* must match|shape mismatch", (18, 19)),
    (r"[Ee]xpected .*(target|Long|floating point type|scalar type)", (18,)),
    (r"returned nan values", NOT_FINITE),
    (r"lr_scheduler.step\(\)` before `optimizer.step", (17, 21)),
    (r"No inf checks were recorded|unscale_\(\) has already been called", (17,)),
)


class NotApplicableError(Exception):
    """The tool has no way to be applied to this case; the text says why."""


@dataclass(frozen=True)
class Message:
    rule: str
    text: str
    kinds: tuple[int, ...] = ()
    names: tuple[str, ...] = ()  # parameters
    line: int | None = None
    alarm: bool = True  # False: the tool itself calls it information

    @property
    def keys(self) -> list[tuple[str, str]]:
        return [(self.rule, name) for name in self.names or ("",)]


@dataclass(frozen=True)
class Subject:
    """What a tool is applied to: the script, and its one-batch form if it has one."""

    script: Path
    one_batch: Path | None = None
    why_no_batch: str = ""


def torch_kinds(text: str) -> tuple[int, ...]:
    return tuple(n for pattern, kinds in TORCH_SAYS if re.search(pattern, text) for n in kinds)


def run(script: Path) -> BaseException | None:
    """Runs the script as `__main__`; the exception that ended it."""
    sys.argv = [str(script)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException as error:
        return None if isinstance(error, SystemExit) and not error.code else error
    return None


@dataclass(frozen=True)
class Tool:
    name: str
    package: str  # the distribution; "" for torch itself
    run: Callable[[Subject], list[Message]]
    form: str
    long: bool = False  # watches trends: is given three times the steps
