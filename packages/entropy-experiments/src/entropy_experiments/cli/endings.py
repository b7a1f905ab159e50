"""How a command ends when something is wrong.

A ValueError (or MemoryError) that this package raised itself is about the user's input, and its
message says what to do: no traceback, exit code 2. The same from inside a library is our bug:
traceback, exit code 1.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

import entropy_experiments
from entropy_experiments.input_errors import message, printable, words_of_os_error
from entropy_experiments.sampling.finishing import TERMINATED

DONE, UNEXPECTED, BAD_INPUT, FINDINGS, INTERRUPTED = 0, 1, 2, 3, 130
HUNG_UP = 128 + signal.SIGHUP
EXIT_CODES = {
    DONE: "done",
    UNEXPECTED: "an unexpected error, with its traceback; doctor: the script crashed",
    BAD_INPUT: "bad input: the message says what to change",
    FINDINGS: "doctor: findings of warning or above; arc, train: no gradient where one must be",
    HUNG_UP: "ended by SIGHUP (the terminal closed): run the same command to resume",
    INTERRUPTED: "interrupted: the message says what is saved and how to resume",
    TERMINATED: "ended by SIGTERM: current work is saved; run the same command to resume",
}
"""Of every verb; docs/reference/commands.md says more."""
PACKAGE = Path(entropy_experiments.__file__).parent


class EndedBySignal(KeyboardInterrupt):
    """SIGTERM or SIGHUP: what Ctrl-C does, by a scheduler or a terminal that was closed."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, signal.Signals(number).name
        super().__init__(self.name)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP interrupt as Ctrl-C does, unless somebody handles them already.

    For a process alone: a rank that waits for another one would not come to a handler of Python's
    (`sampling.finishing`).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: Any) -> None:
        raise EndedBySignal(number)

    # nohup ignores SIGHUP, and it stays ignored.
    ours = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def ending(
    *,
    debug: bool,
    interrupted: Callable[[], str] = lambda: "Interrupted.",
    packages: tuple[Path, ...] = (PACKAGE,),
) -> Iterator[None]:
    """Exceptions become messages and exit codes. `interrupted` says what Ctrl-C leaves behind.

    `packages`: folders of the code whose errors are about the input.
    """
    try:
        yield
    except EndedBySignal as end:
        message_text = interrupted().removeprefix("Interrupted").lstrip()
        typer.echo(
            printable(
                f"\nEnded by {end.name}{'' if message_text[:1] in '.' else ' '}{message_text}"
            ),
            err=True,
        )
        raise typer.Exit(128 + end.number) from None
    except KeyboardInterrupt:
        typer.echo(printable(f"\n{interrupted()}"), err=True)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        raise
    except (ValueError, MemoryError, OSError) as failure:
        ours = _ours(failure, packages)
        if debug or not ours:
            _unexpected(failure)
            raise typer.Exit(BAD_INPUT if ours else UNEXPECTED) from None
        message_text = words_of_os_error(failure) if isinstance(failure, OSError) else failure
        typer.echo(f"Error: {message(message_text)}", err=True)
        raise typer.Exit(BAD_INPUT) from None
    except typer.Exit:
        raise
    except Exception as failure:
        _unexpected(failure)
        raise typer.Exit(UNEXPECTED) from None


def _ours(failure: BaseException, packages: tuple[Path, ...]) -> bool:
    """About the input: about a file, or raised by a line of these packages."""
    if isinstance(failure, OSError):
        return True
    frames = traceback.extract_tb(failure.__traceback__)
    return bool(frames) and any(Path(frames[-1].filename).is_relative_to(p) for p in packages)


def _unexpected(failure: BaseException) -> None:
    traceback.print_exception(failure, file=sys.stderr)
