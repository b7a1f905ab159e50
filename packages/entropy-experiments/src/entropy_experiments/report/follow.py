"""A report that is drawn again while its training goes on.

The rows of a probed training only grow, and the trainer's own state is a file too: whenever either
has changed, the page is written anew. Training has ended when its state has come to max_steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from entropy_experiments.report.training import (
    STATE,
    ended,
    probed_levels,
    trainer_state,
    training_file,
)
from entropy_experiments.results import ROWS_FILE

EVERY = 5.0
"""Seconds between two looks at the files, and after which a browser loads the page again."""


def follow(
    run: Path,
    draw: Callable[[bool], object],
    *,
    every: float = EVERY,
    sleep: Callable[[float], None] = time.sleep,
    say: Callable[[str], None] = lambda line: None,
) -> int:
    """Call `draw(whether training goes on)` at every change until training ends; how often it was.

    Fewer than two probed steps cannot be drawn: then it waits. Ctrl-C ends it, the page stays.
    """
    if not (run.is_dir() or training_file(run) is not None):
        raise FileNotFoundError(
            f"--follow: no {run}; expected the output folder of a probed training, or its "
            f"{ROWS_FILE}."
        )
    folder = run if run.is_dir() else run.parent
    seen, drawn, waiting = None, 0, False
    while True:
        # Before it is read: what is written in the meantime is a change of the next look.
        now = _signature(run, folder)
        over = ended(trainer_state(folder))
        rows = training_file(run)
        if rows is not None and probed_levels(rows) >= 2 and now != seen:
            draw(not over)
            seen, drawn = now, drawn + 1
        elif not drawn and not waiting:
            say(f"waiting for the second probed step in {folder}")
            waiting = True
        if over:
            return drawn
        sleep(every)


def _signature(run: Path, folder: Path) -> tuple[tuple[str, int, int], ...]:
    rows = run / ROWS_FILE if run.is_dir() else run
    files = [rows, folder / STATE, *sorted(folder.glob(f"checkpoint-*/{STATE}"))]
    files += sorted(folder.glob("entropy_probe_ledgers/step_*/summary.json"))
    signature = []
    for path in files:
        try:
            facts = path.stat()
        except OSError:
            continue
        signature.append((str(path), facts.st_size, facts.st_mtime_ns))
    return tuple(signature)
