"""Forwards without gradients, again and again: `generate`, rollouts, evaluations.

A sampled response is hundreds of forwards of one model, and what the doctor learns from them it has
learnt from the first. That one is traced. Of the others it is only noted what their outputs depend
on, as the first has shown: the same parameters, and whatever the inputs bring along. Forwards that
draw from torch's distributions are always traced: their draws become actions.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gradient_doctor import modes
from gradient_doctor.session import Session
from gradient_doctor.taint import Taint, merged, tensors_in
from gradient_doctor.trace import Trace


@dataclass
class Running:
    """An outermost forward without gradients."""

    module: nn.Module
    key: Hashable
    draws: int
    place: int | None = None  # of our mode on the stack, while it is off
    taints: list[Taint] = field(default_factory=list)
    depth: int = 1  # forwards inside of each other


class Rollouts:
    """Asked by the watch at the beginning and the end of each forward of a traced step."""

    def __init__(self, session: Session, trace: Trace) -> None:
        self.session = session
        self.trace = trace
        self._known: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, int | None]] = (
            weakref.WeakKeyDictionary()
        )
        self._running: Running | None = None

    @property
    def aside(self) -> bool:
        """Whether a forward is running that is not traced."""
        return self._running is not None and self._running.place is not None

    def enters(self, module: nn.Module, args: Any, kwargs: Any, outermost: bool) -> None:
        if self._running is not None:
            self._running.depth += 1
            return
        if not outermost or torch.is_grad_enabled() or not self.trace.on:
            return
        key = (module.training, *map(_kind, (*args, *kwargs.items())))
        running = self._running = Running(module, key, self.session.draws)
        mask = self._known.get(module, {}).get(key)
        if mask is None:
            return
        place = modes.place(self.trace)
        if place is None:
            return  # inside of a torch call, which has taken our mode off
        session = self.session
        leaves = [session.taint_of(p) for p in session.registry.tensors(mask)]
        inputs = map(session.taint_of, tensors_in([args, kwargs], depth=4))
        running.taints = [t for t in (*leaves, *inputs) if t is not None]
        running.place = place
        modes.remove(self.trace)

    def leaves(self, module: nn.Module, result: Any) -> None:
        running = self._running
        if running is None:
            return
        running.depth -= 1
        if running.depth:
            return
        self._running = None
        if running.place is not None:
            modes.insert(self.trace, running.place)
            self.trace.passed_over(type(module).__name__, running.taints, result)
            return
        session = self.session
        outputs = [session.taint_of(t) for t in tensors_in(result)]
        depends = merged(t for t in outputs if t is not None)[0]
        own = session.registry.bits(module.parameters())
        quiet = session.draws == running.draws
        known = self._known.setdefault(module, {})
        known[running.key] = depends & own if quiet and outputs else None

    def forget(self) -> None:
        """The hooks are taken off in the middle of a forward, or put on again."""
        running, self._running = self._running, None
        if running is not None and running.place is not None:
            modes.insert(self.trace, running.place)


def _kind(argument: Any) -> Hashable:
    """What may change the way through a forward: flags and names, not data."""
    if isinstance(argument, tuple) and len(argument) == 2 and isinstance(argument[0], str):
        return argument[0], _kind(argument[1])
    if argument is None or isinstance(argument, (bool, str)):
        return argument
    return type(argument).__name__
