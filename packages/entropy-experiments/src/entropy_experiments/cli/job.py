"""How a command ends: exit codes and messages; alone, or as one job of several processes.

A ValueError (or MemoryError) that this package raised itself is about the user's input, and its
message says what to do: no traceback, exit code 2. The same from inside a library is our bug:
traceback, exit code 1.

    torchrun --nproc-per-node 2 -m entropy_experiments.cli run

Under torchrun every process runs the whole command; the loops inside are dealt out (`distributed`).
Rank 0 alone prints and writes. What goes wrong on one rank ends all of them: the lowest rank that
failed gives the message, the others leave without a word once it has been given. A rank that is
ended by SIGTERM, because another is lost, stores its current unit first (`sampling.finishing`).

What has nothing to deal out (ONE_PROCESS) is done by rank 0 alone; the others leave at once.

Without torchrun nothing of this happens, and torch is not imported.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import entropy_experiments
from entropy_experiments.input_errors import (
    library_errors,
    message,
    printable,
    words_of,
    words_of_os_error,
)
from entropy_experiments.sampling.finishing import TERMINATED
from entropy_experiments.torchrun import ranks_of_job, variable

if TYPE_CHECKING:
    from entropy_experiments.distributed import Ranks


DONE, UNEXPECTED, BAD_INPUT, FINDINGS, INTERRUPTED = 0, 1, 2, 3, 130
HUNG_UP = 128 + signal.SIGHUP
CLOSED_PIPE = 128 + signal.SIGPIPE
EXIT_CODES = {
    DONE: "done",
    UNEXPECTED: "an unexpected error, with its traceback; doctor: the script crashed",
    BAD_INPUT: "bad input: the message says what to change",
    FINDINGS: "doctor: findings; arc, train: no gradient where one must be; verify: differs",
    HUNG_UP: "ended by SIGHUP (the terminal closed): run the same command to resume",
    INTERRUPTED: "interrupted: the message says what is saved and how to resume",
    CLOSED_PIPE: "the reader of stdout left (| head): files are written, the text is cut",
    TERMINATED: "ended by SIGTERM: current work is saved; run the same command to resume",
}
"""Of every verb; docs/reference/commands.md says more."""
PACKAGE = Path(entropy_experiments.__file__).parent
LAST_WORDS = timedelta(seconds=5)
"""For the message of the rank that failed: torchrun ends the others with the first that leaves."""
OMP_VARIABLE = "OMP_NUM_THREADS"
MOST_THREADS = 64
"""Also on a machine with fewer cores: last digits depend on the number of threads, and a run of a
larger machine may have to be repeated."""
ONE_PROCESS = ("report", "query", "verify", "config", "arc")
"""Verbs that rank 0 runs alone."""
STORED = "Ended by SIGTERM. Current work is saved; run the same command to resume."


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
        _discard_stdout()
        raise typer.Exit(CLOSED_PIPE) from None
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
    except Warning as failure:  # raised by a library's warnings.warn
        typer.echo(
            f"Error: A library's warning was raised as an error ({words_of(failure)}). Set no "
            "PYTHONWARNINGS=error and no -W error, or exclude this warning there.",
            err=True,
        )
        raise typer.Exit(BAD_INPUT) from None
    except Exception as failure:
        _unexpected(failure)
        raise typer.Exit(UNEXPECTED) from None


def _discard_stdout() -> None:
    """Nobody reads it any more: what is still buffered may not fail again when Python exits."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _ours(failure: BaseException, packages: tuple[Path, ...]) -> bool:
    """About the input: about a file, or raised by a line of these packages."""
    if isinstance(failure, OSError):
        return True
    frames = traceback.extract_tb(failure.__traceback__)
    return bool(frames) and any(Path(frames[-1].filename).is_relative_to(p) for p in packages)


def _unexpected(failure: BaseException) -> None:
    traceback.print_exception(failure, file=sys.stderr)


def is_multi_process() -> bool:
    """Whether torchrun has started more than one of these."""
    if "RANK" not in os.environ:
        return False
    with ending(debug=False):
        return ranks_of_job()[1] > 1


def speaks() -> bool:
    """Whether this process prints and writes, as the environment has it: alone, or rank 0."""
    return not is_multi_process() or ranks_of_job()[0] == 0


@contextmanager
def shared_ending(
    *,
    debug: bool,
    threads: int | None = None,
    interrupted: Callable[[], str] = lambda: "Interrupted.",
) -> Iterator[bool]:
    """`ending`, shared by all processes of the job. Gives whether this one speaks.

    `threads`: as many as this on the CPU; None leaves it to the computation.
    """
    if not is_multi_process():
        with (
            ending(debug=debug, interrupted=interrupted),
            signals_interrupt(),
            on_threads(threads),
        ):
            yield True
        return

    from entropy_experiments.distributed import across
    from entropy_experiments.sampling.finishing import finishing_units

    with ending(debug=debug):
        ranks = _join_ranks()
    try:
        with (
            ending(debug=debug, interrupted=interrupted),
            _one_error_message(ranks),
            on_threads(threads),
        ):
            with across(ranks), finishing_units(), _quiet_libraries(ranks, debug=debug):
                yield ranks.first
            ranks.agree()  # nobody leaves while rank 0 writes: it may still fail
    except typer.Exit as end:
        if end.exit_code not in (0, TERMINATED):  # SIGTERM: somebody waits for this to end
            _wait_for_message()
        raise
    finally:
        _leave_ranks()


def on_threads(threads: int | None) -> AbstractContextManager[None]:
    """Inside, so many on the CPU; None leaves it to the computation."""
    _check_threads("--threads", threads)
    # A list is for nested parallel regions; what is no number the library itself complains about.
    first = os.environ.get(OMP_VARIABLE, "").partition(",")[0].strip()
    _check_threads(OMP_VARIABLE, int(first) if first.isdecimal() else None)
    if threads is None:  # torch takes a second to import; bad input is refused before that
        return nullcontext()

    from entropy_experiments.threads import fixed_threads

    return fixed_threads(threads)


def _check_threads(what: str, threads: int | None) -> None:
    """Refuse a number at which OpenMP ends the process: each thread has a stack."""
    most = max(MOST_THREADS, os.cpu_count() or 1)
    if threads is not None and threads > most:
        raise ValueError(
            f"{what} is {threads}; expected at most {most}. This machine has {os.cpu_count()} "
            "cores, and more threads than cores are slower."
        )


def _join_ranks() -> Ranks:
    import torch
    import torch.distributed as dist

    from entropy_experiments.distributed import PATIENCE, Ranks

    variable("LOCAL_RANK", 0)
    if torch.cuda.is_available():
        local = variable("LOCAL_RANK", 0)
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"This machine has {torch.cuda.device_count()} CUDA devices, and this is its "
                f"process {local + 1}; expected a device for each. Lower --nproc-per-node."
            )
        torch.cuda.set_device(local)
    with library_errors(
        "The processes of this job cannot be joined",
        "Start the command with torchrun, which sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
        "MASTER_PORT, or unset them to run alone.",
    ):
        dist.init_process_group("gloo", timeout=PATIENCE)
    return Ranks(dist.group.WORLD)


def _leave_ranks() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def leaving() -> Iterator[None]:
    """Under torchrun the process ends here, without Python's own shutdown.

    A thread of gloo's may still hold the last tensor of a collective. When it releases it while the
    interpreter shuts down, Python ends that thread inside C++ code, and the process aborts
    ("terminate called without an active exception") after all its work is done and written.
    """
    try:
        yield
    except SystemExit as end:
        if end.code not in (None, DONE) and not isinstance(end.code, int):
            raise  # a message, which Python prints
        if "RANK" not in os.environ or not is_multi_process():
            raise
        atexit._run_exitfuncs()  # what libraries clean up
        for stream in (sys.stdout, sys.stderr):
            with suppress(BrokenPipeError):
                stream.flush()
        os._exit(end.code or DONE)


@contextmanager
def _one_error_message(ranks: Ranks) -> Iterator[None]:
    """An error passes on one rank only; on the others it is an exit code."""
    from entropy_experiments.distributed import LostRankError, RankError, announced
    from entropy_experiments.sampling.finishing import Terminated

    try:
        yield
    except typer.Exit:
        raise
    except Terminated:
        typer.echo(f"rank {ranks.rank}: {STORED}", err=True)
        raise typer.Exit(TERMINATED) from None
    except KeyboardInterrupt:  # torchrun passes Ctrl-C on to every rank
        if not ranks.first:
            raise typer.Exit(INTERRUPTED) from None
        raise
    except Exception as error:
        if not announced(error):
            ranks.first_failed = None  # an earlier refusal may have been caught
            with suppress(RankError):  # if nobody is left to be told
                ranks.agree(failed=True, error=error)
        if isinstance(error, LostRankError):
            # The rank that is gone said nothing: whoever notices does.
            typer.echo(f"rank {ranks.rank}: {error}", err=True)
            raise typer.Exit(UNEXPECTED) from None
        if isinstance(error, RankError) or ranks.first_failed not in (None, ranks.rank):
            raise typer.Exit(UNEXPECTED) from None
        if not ranks.first:
            typer.echo(f"On rank {ranks.rank} of {ranks.size}:", err=True)
        raise


@contextmanager
def _quiet_libraries(ranks: Ranks, *, debug: bool) -> Iterator[None]:
    """What is printed on the way is printed by rank 0; warnings of others are seen with --debug."""
    if ranks.first:
        yield
        return
    # Not closed: a library's log handlers may keep it until the process ends.
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115
    with redirect_stdout(nowhere), nullcontext() if debug else redirect_stderr(nowhere):
        yield


def _wait_for_message() -> None:
    """Wait until the rank that failed has given its message, or is gone."""
    import torch.distributed as dist

    sys.stderr.flush()
    try:
        dist.monitored_barrier(timeout=LAST_WORDS)
    except RuntimeError:
        return  # it has left already, message and all
