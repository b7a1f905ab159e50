"""A training in a process that can be killed, at a time or at its n-th change of a file.

Processes are forked from one that has imported everything, so that an instant of the training is
not an instant of `import torch`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

CHANGES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
"""Audit events that may change what is on disk; `open` only if it writes."""
COUNT = "changes"
"""Beside the folder of the training: how many changes there were."""


def context() -> ForkServerContext:
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["entropy_experiments.online.train.run", "oracles.tiny_grpo"])
    return made


def start(
    made: ForkServerContext, folder: Path, settings: dict[str, Any], *, kill_at: int | None = None
) -> ForkServerProcess:
    """Train into `folder/out`, which is resumed if it was begun. `kill_at`: a change of a file."""
    folder.mkdir(exist_ok=True)
    process = made.Process(target=_train, args=(str(folder), settings, kill_at))
    process.start()
    return process


def _train(folder: str, settings: dict[str, Any], kill_at: int | None) -> None:
    from entropy_experiments.config.training_reading import parse_training
    from entropy_experiments.online.train.folder import begun
    from entropy_experiments.online.train.run import train

    os.chdir(folder)  # a relative --out: no file of the run names the folder
    counted = _count_changes(os.path.join(folder, "out"), kill_at)
    with (
        open("output.txt", "a") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        train(parse_training({**settings, "output_dir": "out"}), resume=begun(Path("out")))
    Path(COUNT).write_text(str(len(counted)))


def _count_changes(out: str, kill_at: int | None) -> list[str]:
    """Listen to file changes below `out`; SIGKILL to ourselves before the one of this number."""
    counted: list[str] = []

    def listen(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or not isinstance(arguments[0], str | os.PathLike):
            return
        if event == "open" and not (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            return
        path = os.path.abspath(os.fspath(arguments[0]))
        if path != out and not path.startswith(out + os.sep):
            return
        if kill_at is not None and len(counted) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        counted.append(path)

    sys.addaudithook(listen)
    return counted


def ended(process: ForkServerProcess, *, patience: float) -> bool:
    """Whether it came to its end; False if it was killed. Anything else is a failure."""
    process.join(patience)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"a training had not ended after {patience} s")
    assert process.exitcode in (0, -signal.SIGKILL), f"it ended with {process.exitcode}"
    return process.exitcode == 0


def kill_after(seconds: float, process: ForkServerProcess, *, patience: float) -> bool:
    """Whether it was still at work."""
    time.sleep(seconds)
    process.kill()
    return not ended(process, patience=patience)
