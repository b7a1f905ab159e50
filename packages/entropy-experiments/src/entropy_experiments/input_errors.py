"""Errors about the user's input: one sentence each, whoever noticed.

A library that is handed a damaged file raises whatever it likes: KeyError, ZeroDivisionError, a
Rust panic. Where such input enters, `library_errors` turns what the *library* raised into one
sentence with the file; what a line of this package raised passes untouched, so a bug of ours stays
visible. Patterns and templates from a file may run for ever: `time_limit` ends them. What comes
from a file is printed through `printable`: a terminal obeys control characters.
"""

from __future__ import annotations

import errno
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

PACKAGE = Path(__file__).parent
LONGEST = 300
"""Characters of a library's own words that are repeated."""
LONGEST_MESSAGE = 3000
UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's controls, formats (text turned around), lone surrogates and line separators."""


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

    It may change the working directory only of its own: that would move every relative path of the
    run, so the directory is restored and the change refused.
    """
    before = Path.cwd()
    try:
        yield
    except (Exception, SystemExit) as error:
        os.chdir(before)
        if isinstance(error, TimeLimitError):
            raise
        what_it_did = "called sys.exit" if isinstance(error, SystemExit) else failed
        raise InputError(f"{what} {what_it_did} ({words_of(error)}). {advice}") from error
    if (after := Path.cwd()) != before:
        os.chdir(before)
        raise InputError(
            f"{what} changed the working directory to {after}; expected it to stay {before}, from "
            "which the paths of this run are read. Change it back before returning."
        )


REMEDIES = {
    errno.ENOSPC: "The disk is full: free some space, or choose another folder",
    errno.EDQUOT: "The quota is used up: free some space, or choose another folder",
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
