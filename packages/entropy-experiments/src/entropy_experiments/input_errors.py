"""Input of users: files read within bounds, code run within limits, errors in one sentence.

A library that is handed a damaged file raises whatever it likes: KeyError, ZeroDivisionError, a
Rust panic. Where such input enters, `library_errors` turns what the *library* raised into one
sentence with the file; what a line of this package raised passes untouched, so a bug of ours stays
visible. Patterns and templates from a file may run for ever: `time_limit` ends them. What comes
from a file is printed through `printable`: a terminal obeys control characters. Files from
elsewhere are regular ones, of a size, not nested without end.
"""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import threading
import time
import traceback
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from entropy_experiments.process_state import ProcessState

PACKAGE = Path(__file__).parent
LONGEST = 300
"""Characters of a library's own words that are repeated."""
LONGEST_MESSAGE = 3000
UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's controls, formats (text turned around), lone surrogates and line separators."""
LARGEST_JSON = 256 * 2**20
"""Bytes; the log of a long training, in trainer_state.json, has tens of megabytes."""
LONGEST_PATH = 4096
DAMAGED = "The file was truncated or edited by hand: restore it, or use an earlier one"


class InputError(ValueError):
    """About a file, a key or code of the user's: the message says what to change."""


class TimeLimitError(InputError):
    """Something from a file ran for longer than it may."""


def printable(text: object) -> str:
    """Text that no terminal obeys: control characters as escapes, lines and tabs as they are."""
    return "".join(_shown(c) for c in str(text))


def _shown(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in UNSEEN:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode()


def message(text: object) -> str:
    """An error as it is printed: `printable`, and not longer than a screen."""
    shown = printable(text)
    if len(shown) <= LONGEST_MESSAGE:
        return shown
    return f"{shown[: LONGEST_MESSAGE * 3 // 4]}...{shown[-LONGEST_MESSAGE // 4 :]}"


def short(text: object, most: int = LONGEST) -> str:
    """The first line of a text, cut."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    if first.endswith(":") and len(lines) > 1:
        first = f"{first} {lines[1]}"  # "Validation error for field 'hidden_size':"
    return first if len(first) <= most else f"{first[: most - 3]}..."


def words_of(error: BaseException) -> str:
    """Kind and text of an error, even one whose text raises."""
    try:
        words = short(error)
    except Exception:  # __str__ of somebody's own class
        words = "it has no words"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def raised_here(error: BaseException) -> bool:
    """Whether the innermost line of its traceback is this package's."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE)


@contextmanager
def library_errors(what: str, advice: str) -> Iterator[None]:
    """What a library raises inside becomes `what (its words). advice`; our own errors pass."""
    try:
        yield
    except Exception as error:
        if raised_here(error):
            raise
        raise InputError(f"{what} ({words_of(error)}). {advice}") from error
    except BaseException as error:
        # Rust panics (tokenizers, safetensors) are no Exceptions to Python.
        if type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{what} ({words_of(error)}). {advice}") from error


class _Expired(BaseException):
    """Not an Exception: code that catches those must not catch its own time limit."""


_RING = getattr(signal, "SIGRTMIN", 34) + 9
"""Beside SIGALRM, whose alarms a reward may set and cancel for itself."""
AGAIN = 0.2
"""Seconds between rings: a bare `except:`, or a pool that waits for its workers, swallows some."""


def can_interrupt() -> bool:
    """Whether `time_limit` works here: signals reach the main thread alone."""
    main = threading.current_thread() is threading.main_thread()
    return main and hasattr(signal, "setitimer") and hasattr(signal, "SIGRTMIN")


@contextmanager
def time_limit(seconds: float, what: str, advice: str) -> Iterator[None]:
    """Raise TimeLimitError if the block takes longer; no limit where nothing `can_interrupt`.

    Two things ring, again and again until the block has ended: the kernel's timer, which needs no
    lock of Python's (a regular expression holds it), and a thread, which nobody cancels. Code that
    swallows every ring ends when it ends by itself; it is late all the same.
    """
    if not can_interrupt():
        yield
        return
    started, main, ended = time.monotonic(), threading.get_ident(), threading.Event()
    over = False

    def late() -> bool:
        return time.monotonic() - started >= seconds

    def ring(*_: Any) -> None:
        if late() and not over:
            raise _Expired

    def watch() -> None:
        wait = seconds
        while not ended.wait(wait):
            signal.pthread_kill(main, _RING)
            wait = AGAIN

    before = {number: signal.getsignal(number) for number in (signal.SIGALRM, _RING)}
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    watcher = threading.Thread(target=watch, daemon=True, name="time limit")
    try:
        try:
            # Inside: on a busy machine the limit may pass before the block begins.
            for number in before:
                signal.signal(number, ring)
            signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
            watcher.start()
            yield
        finally:
            over = True  # a plain store: a ring comes at calls, and none may come before this
        if late():
            raise _Expired
    except _Expired:
        raise TimeLimitError(f"{what} takes more than {seconds:g} s. {advice}") from None
    finally:
        ended.set()
        signal.setitimer(signal.ITIMER_REAL, 0)
        if watcher.ident is not None:
            watcher.join()
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: not set from Python
        if left:  # somebody's own alarm, less the time that has gone
            gone = time.monotonic() - started
            signal.setitimer(signal.ITIMER_REAL, max(left - gone, 1e-3), interval)


@contextmanager
def users_code(what: str, advice: str, *, failed: str = "failed") -> Iterator[None]:
    """Code of the user's, such as a reward: what it raises, sys.exit too, becomes one sentence.

    It may change the state of the process (`process_state`) only for itself: the state is restored,
    and the change refused. Ctrl-C and an outer `time_limit` pass.
    """
    before = ProcessState()
    try:
        yield
    except (KeyboardInterrupt, _Expired):
        before.restore()
        raise
    except BaseException as error:  # asyncio.CancelledError and GeneratorExit are no Exceptions
        before.restore()
        if isinstance(error, TimeLimitError):
            raise
        what_it_did = "called sys.exit" if isinstance(error, SystemExit) else failed
        raise InputError(f"{what} {what_it_did} ({words_of(error)}). {advice}") from error
    if changes := before.restore():
        raise InputError(
            f"{what} {', '.join(changes)}; expected it to stay as it was before, for this run "
            "depends on it. Change it back before returning."
        )


REMEDIES = {
    errno.ENOSPC: "The disk is full: free some space, or choose another folder",
    errno.EDQUOT: "The quota is used up: free some space, or choose another folder",
    errno.EFBIG: "It would exceed a limit of the file system or of `ulimit -f`: raise that, or "
    "choose another folder",
    errno.EROFS: "That place can only be read: choose another folder",
    errno.EACCES: "Permission is missing: change it, or choose another place",
    errno.EPERM: "Permission is missing: change it, or choose another place",
    errno.ENOTDIR: "A part of the path is a file: choose another folder",
    errno.EISDIR: "It is a folder; expected a file",
    errno.EEXIST: "It is there already, and no folder: choose another place",
    errno.ENAMETOOLONG: "The name is too long: choose a shorter one",
    errno.EMFILE: "Too many files are open: raise the limit (ulimit -n)",
}


def words_of_os_error(error: OSError) -> str:
    """The path, what happened, and what to do; a message of our own as it is."""
    if error.errno is None:
        return str(error) or type(error).__name__
    place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    remedy = REMEDIES.get(error.errno)
    return f"{place}{error.strerror}." + (f" {remedy}." if remedy else "")


def expand_path(path: Path | str, what: str) -> Path:
    """With ~ as the home folder; `what` names the option or key for the message."""
    if len(str(path)) > LONGEST_PATH or "\0" in str(path):
        got = f"of {len(str(path))} characters" if "\0" not in str(path) else "with a zero byte"
        raise InputError(f"{what} is a path {got}; expected that of a file or folder.")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{what} is {str(path)!r}: {error} Write the folder out.") from error


def check_regular(path: Path, *, most: int | None = None) -> None:
    """Refuse what could be read for ever: a pipe, a device, or more than `most` bytes."""
    if not path.is_file():
        what = "not there" if not path.exists() else "no regular file"
        raise InputError(f"{path} is {what}; expected a file. Check the path.")
    if most is not None and path.stat().st_size > most:
        raise InputError(
            f"{path} has {path.stat().st_size:,} bytes; expected at most {most:,}. Is it the "
            "right file?"
        )


def refuse_special_files(folder: Path) -> None:
    """Refuse a folder with pipes, sockets or devices in it: a library would read them for ever."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise InputError(
                f"{path} is no regular file; expected files and folders in a checkpoint. Remove it."
            )


def read_json_value(path: Path, *, advice: str = DAMAGED, most: int = LARGEST_JSON) -> Any:
    """Any JSON value; a file that is not JSON, or is made to exhaust a reader, is refused."""
    check_regular(path, most=most)
    return parse_json(path.read_bytes(), source=str(path), advice=advice)


def parse_json(data: bytes | str, *, source: str, advice: str = DAMAGED) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise InputError(
            f"{source} is not valid JSON that can be read (nested too deeply). {advice}."
        ) from None
    except ValueError as error:  # also: bytes that are no text, integers of thousands of digits
        reason = str(error).partition(";")[0]
        raise InputError(f"{source} is not valid JSON ({reason}). {advice}.") from error


def is_finite_number(value: Any) -> bool:
    """Whether a JSON value is a number that a float holds; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def check_text(text: str, *, where: str, name: str) -> None:
    """Refuse half of a surrogate pair, which JSON can write and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: {name} has half a surrogate pair ({text[error.start]!a}) at character "
            f"{error.start}; expected text. Write the dump again, or drop this rollout."
        ) from None


def read_jsonl(path: Path, expected: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not blank; `expected` says what one looks like."""
    if not path.is_file():
        raise FileNotFoundError(f"No such file: {path}. Expected lines like {expected}.")
    any_line = False
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except RecursionError:
                raise ValueError(
                    f"{path}:{number}: not JSON that can be read (nested too deeply). Expected a "
                    f"line like {expected}."
                ) from None
            except ValueError as error:
                raise ValueError(
                    f"{path}:{number}: not JSON ({short(error, 120)}). Expected a line like "
                    f"{expected}."
                ) from error
            if not isinstance(record, dict):
                raise ValueError(
                    f"{path}:{number}: got a JSON {type(record).__name__}; expected an object like "
                    f"{expected}."
                )
            any_line = True
            yield number, record
    if not any_line:
        raise ValueError(f"{path} has no lines. Expected at least one like {expected}.")
