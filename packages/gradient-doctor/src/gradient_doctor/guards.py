"""Between a user's call and torch: the call is made exactly once, whatever our own code does.

An observer is a generator with the arguments of the call. What comes before its `yield` runs before
the call; the `yield` gives the result of the call, or raises what it raised. An observer may yield
`(args, kwargs)` to be called with; one that returns without a `yield` lets the call pass. Its own
mistakes go to `session.broke` and never reach the user. Calls of `session.strangers` pass by, as do
all calls once the session is `over` (a wrapper may be left under one of the user's), and those that
torch.jit.trace records, which would record ours as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

from gradient_doctor.readable import is_recorded
from gradient_doctor.session import Session


def observed(
    session: Session, part: Any, observe: Callable[..., Iterator[Any]], *, rests: bool = False
) -> Callable[[Any], Any]:
    """Makes the wrapper of a function, for `Patches.replace`.

    One that `rests` lets calls pass in rollouts that are known; see rounds.py.
    """

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if rests and (session.asleep or session.drowsy):
                return original(*args, **kwargs)
            if session.over or is_recorded() or get_ident() in session.strangers:
                return original(*args, **kwargs)
            # the original is called outside of all `except`: its errors have no context of ours
            observer: Any = None
            returned: Any = None
            with _ours(session, part):
                begun: Any = observe(*args, **kwargs)
                returned = next(begun, _PASS)
                observer = None if returned is _PASS else begun
            if observer is None:
                return original(*args, **kwargs)
            if returned is not None:
                args, kwargs = returned
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                traceback = error.__traceback__
                with _ours(session, part, error):
                    observer.throw(error)
                error.__traceback__ = traceback  # without the observer's own frames
                del traceback  # it holds this frame: a circle would keep the user's tensors
                raise
            with _ours(session, part):
                _finish(observer, result)
            return result

        return call

    return make


def guarded(method: Any) -> Any:
    """For hooks: a method of an object with a `session`, whose mistakes end with itself."""

    @functools.wraps(method)
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        session = self.session
        if not (session.over or is_recorded() or get_ident() in session.strangers):
            with _ours(session, self):
                return method(self, *args, **kwargs)
        return None

    return hook


_PASS = object()


class _ours:  # noqa: N801  (a generator would cost more than what most observers do)
    """What fails inside is ours, unless it is the error that was handed in."""

    __slots__ = ("part", "session", "theirs")

    def __init__(self, session: Session, part: Any, theirs: BaseException | None = None) -> None:
        self.session, self.part, self.theirs = session, part, theirs

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if error is None or error is self.theirs or isinstance(error, StopIteration):
            return True
        if not isinstance(error, Exception):
            return False
        if not _is_wrapped(error, self.theirs):
            self.session.broke(self.part, error)
        return True


def _is_wrapped(error: BaseException, theirs: BaseException | None) -> bool:
    """No generator lets a StopIteration through: Python raises a RuntimeError from it (PEP 479)."""
    return (
        isinstance(theirs, StopIteration)
        and type(error) is RuntimeError
        and error.__cause__ is theirs
    )


def _finish(observer: Any, result: Any) -> None:
    try:
        observer.send(result)
    except StopIteration:
        return
    raise RuntimeError("an observer has yielded twice")
