"""Rounds of a rollout: who has followed one of them knows the others.

A policy that samples does the same thing hundreds of times: a forward without gradients, a draw, a
step of an environment. After a few forwards of one module in which nothing could learn, the doctor

- sleeps until the region without gradients ends: neither a mode nor hooks, so it costs nothing;
- is drowsy where rounds have regions of their own, between these, and in a region that goes on
  after its loop: calls on the lines of a round are passed on, any other line wakes it up.

What learns wakes it up as well: a backward, an optimizer, a forward with gradients. What is made in
the meantime is data, but for what the variables of the sleeping function hold when it ends: that
depends on the same as what they held before. And where rounds are put together
(`torch.stack(log_probs)`, a buffer that each of them writes to) the first one, which was followed,
speaks for all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from gradient_doctor import modes
from gradient_doctor.callers import calling_for, stand_in
from gradient_doctor.loop_ends import goes_on_after
from gradient_doctor.python_numbers import names_in
from gradient_doctor.session import Session
from gradient_doctor.sites import decorated, is_doctors_code, is_torch_code, is_user_code
from gradient_doctor.taint import Taint, tensors_in
from gradient_doctor.trace import Trace

_ROUNDS = 2  # of these the first is followed to its end
_SWITCH = torch._C._set_grad_enabled


@dataclass(frozen=True)
class Entered:
    """A region without gradients that the program is in, and the line or function that it is of."""

    manager: Any
    code: CodeType
    line: int  # 0: the whole function

    @property
    def place(self) -> tuple[CodeType, int]:
        return self.code, self.line


@dataclass
class Row:
    """Forwards of one module, of which nothing has learnt in between."""

    first: tuple[Entered, ...]  # where the first one was
    alive: int
    count: int = 0


class Rounds:
    """Told by the watch of regions without gradients and of outermost forwards."""

    def __init__(self, session: Session, trace: Trace, hooks: Callable[[bool], None]) -> None:
        self.session = session
        self.trace = trace
        self._hooks = hooks
        self._home = get_ident()  # modes are a thread's own
        self._entered: list[Entered] = []
        self._rows: dict[tuple[Any, int], Row] = {}
        self._places: set[tuple[CodeType, int]] = set()  # regions that are entered by each round
        self._until: Any = None  # the end of this region is awaited
        self._several = False  # and the next round will enter another one
        self._at = 0  # our mode's place on the stack
        self._frame: FrameType | None = None  # that sleeps
        self._held: dict[str, Taint] = {}  # of what its variables held
        # lines of the rounds -> the call in their name; with gradients switched on or off
        self._lines: dict[tuple[CodeType, int, bool], Any] = {}
        session.learns = self.learns
        trace.rounds = self

    @property
    def dozes(self) -> bool:
        """Whether the end of this region is but the end of a round."""
        return self._several and self.session.asleep

    # regions

    def enters(self, manager: Any) -> None:
        session = self.session
        if not self.trace.on or session.asleep or get_ident() != self._home:
            return
        place = _owner()
        if place is None:
            return  # torch's own
        if torch.is_grad_enabled():
            self._entered.clear()
        outermost = not self._entered
        self._entered.append(Entered(manager, *place))
        if session.drowsy and outermost and self._several:
            if place in self._places:
                self._sleep(manager)
            else:
                self.wake()

    def exits(self, manager: Any) -> None:
        if not self._entered or get_ident() != self._home:
            return
        if manager is self._until:
            if self._several:
                self._wake_up()
                self.session.drowsy = True
            else:
                self.wake()
        elif self.session.asleep:
            return
        for place, entered in enumerate(self._entered):
            if entered.manager is manager:
                del self._entered[place:]
                break

    # forwards

    def forward_ended(self, module: nn.Module) -> None:
        """An outermost forward has returned; nothing of it is running."""
        session = self.session
        if not self._entered or torch.is_grad_enabled() or get_ident() != self._home:
            return
        key = (self._entered[0].place, id(module))
        row = self._rows.get(key)
        if row is None or row.alive != session.alive:
            row = self._rows[key] = Row(tuple(self._entered), session.alive)
        row.count += 1
        session.noting = True
        if row.count < _rounds(self._entered[-1]) or session.drowsy:
            return
        common = [a for a, b in zip(self._entered, row.first) if a.manager is b.manager]
        self._several = not common
        if common and goes_on_after(_frames(common[-1].code), common[-1].code, common[-1].line):
            self._until, session.drowsy = common[-1].manager, True
            return
        if not common:
            self._places.add(self._entered[0].place)
        self._sleep((common or self._entered[:1])[-1].manager)
        if common and session.asleep:
            self._remember(common[-1].code)

    # asleep and awake

    def _sleep(self, until: Any) -> None:
        place = modes.place(self.trace)
        if place is None:
            return  # inside of a torch call, which has taken our mode off
        session = self.session
        self._at, self._until = place, until
        session.asleep, session.drowsy = True, False
        modes.remove(self.trace)
        self._hooks(False)

    def _wake_up(self) -> None:
        session = self.session
        if session.asleep:
            session.asleep = False
            modes.insert(self.trace, self._at)
            self._hooks(True)
            self._recall()
            if torch.is_grad_enabled():
                session.region = None
        self._until = None

    def _remember(self, owner: CodeType) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not owner:
            frame = frame.f_back
        if frame is not None and is_user_code(owner):
            taints = self.session.taints
            held = {n: taints.get(v) for n, v in names_in(frame).items() if isinstance(v, Tensor)}
            self._held = {name: taint for name, taint in held.items() if taint is not None}
            self._frame = frame

    def _recall(self) -> None:
        frame, held = self._frame, self._held
        self._frame, self._held = None, {}
        taints = self.session.taints
        for name, value in names_in(frame).items() if frame is not None and held else ():
            if name not in held or not isinstance(value, Tensor) or value.requires_grad:
                continue
            if value not in taints:
                taints[value] = held[name]

    def wake(self) -> None:
        if (self.session.asleep or self.session.drowsy) and get_ident() == self._home:
            self._wake_up()
            self.session.drowsy = False

    def learns(self) -> None:
        """Something other than sampling happens: the next rounds are of another loop."""
        self.wake()
        if self._rows or self._lines:
            self._rows.clear()
            self._lines.clear()
            self._places.clear()
            self.session.noting = False

    # lines

    def known(self, func: Any, args: Any) -> Any:
        """The call in the name of the line that asks for it, if that line is one of the rounds'.

        Seen from `__torch_function__`. Every other line wakes us up, and so does what puts the
        first round's results together with others: two views of a sample are no rollout.
        """
        frame = calling_for(sys._getframe(2))
        # a buffer that each round writes to is no reader of the first
        read = args[1:] if func is Tensor.__setitem__ else args
        together = torch.is_grad_enabled() and self._is_of_first(read)
        if frame is not None and func is not _SWITCH and not together:
            call = self._lines.get((frame.f_code, frame.f_lineno, torch.is_grad_enabled()))
            if call is not None:
                return call
            self.wake()
        return None

    def _is_of_first(self, args: Any) -> bool:
        """Whether a call takes a result of weights that was followed."""
        taints = self.session.taints
        behind = (taints.get(value) for value in tensors_in(args, depth=2))
        return any(taint is not None and taint.depends for taint in behind)

    def note(self) -> None:
        """A call of a round that is followed; seen from `__torch_function__`."""
        frame = calling_for(sys._getframe(2))
        if frame is not None:
            key = (frame.f_code, frame.f_lineno, torch.is_grad_enabled())
            if key not in self._lines:
                self._lines[key] = stand_in(frame)


def _rounds(region: Entered) -> int:
    """How many forwards are looked at; a library's own loop (`generate`) gives but its result."""
    return _ROUNDS if region.line or is_user_code(region.code) else 1


def _owner() -> tuple[CodeType, int] | None:
    """The function that `no_grad` decorates (0), or the line of the `with`; None for torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        inner = decorated(frame)
        if inner is not None:
            return inner, 0
        if not is_doctors_code(frame.f_code):
            return None if is_torch_code(frame.f_code) else (frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return None


def _frames(owner: CodeType) -> Iterator[tuple[CodeType, int]]:
    """The user's functions that are running, the innermost first, and their lines."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_code(frame.f_code):
            yield frame.f_code, frame.f_lineno
        if frame.f_code is owner:
            return
        frame = frame.f_back
