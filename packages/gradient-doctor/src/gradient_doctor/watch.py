"""The watch: calls of backward, optimizers, scalers and clipping, in the order they happen.

Everything is put back by `stop`. Nothing here changes an argument or a result.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradient_doctor import modes, steps
from gradient_doctor.backwards import Backwards
from gradient_doctor.calls import Calls
from gradient_doctor.compiled import Compiled
from gradient_doctor.contexts import Contexts
from gradient_doctor.distribution_calls import DistributionCalls
from gradient_doctor.guards import guarded, observed
from gradient_doctor.new_phases import NewPhases
from gradient_doctor.patches import Patches
from gradient_doctor.readable import alone
from gradient_doctor.rollouts import Rollouts
from gradient_doctor.rounds import Rounds
from gradient_doctor.session import Session
from gradient_doctor.sites import constructors
from gradient_doctor.trace import Trace

# torch's name for the block that an optimizer's step and its hooks run in, however it ends
_STEP = "Optimizer.step#"
_PEEKS = 3  # of one line without gradients, in steps that are not traced


class Watch:
    """Installs and removes all wrappers and hooks of one session."""

    def __init__(
        self,
        session: Session,
        trace: Trace,
        *,
        stepped: Callable[[Any], None],
        went_back: Callable[[], None],
    ) -> None:
        self.session = session
        self.trace = trace
        self.backwards = Backwards(session, self._backward_ended)
        self.rollouts = Rollouts(session, trace)
        self.rounds = Rounds(session, trace, self._hook)
        self._went_back = went_back
        self._stepped = stepped  # told after each optimizer step: scripts find their steps by it
        self._patches = Patches()
        self._handles: list[Any] = []
        self._module_handles: list[Any] = []
        self._updates: dict[int, steps.Before] = {}
        self._phases = NewPhases(session)
        self.light = False  # no looks in between
        self._peeks: dict[Any, int] = {}  # by the line that switched gradients off
        # optimizers whose step is running, the innermost last, and how often we were paused before
        self._running: list[tuple[Any, int]] = []

    def start(self) -> None:
        self.session.over = False
        self.backwards.install(self._patches)
        DistributionCalls(self.session).install(self._patches)
        Compiled(self._compiled).install(self._patches)
        Calls(self.session, self.trace).install(self._patches)
        self._patches.replace(
            torch.autograd.profiler.record_function,
            "__exit__",
            observed(self.session, self, self._step_left),
        )
        for region in (torch.no_grad, torch.inference_mode):
            for name, look in (("__enter__", self._peek_starts), ("__exit__", self._peek_ends)):
                self._patches.replace(region, name, observed(self.session, self, look))
        Contexts(self.session).install(self._patches)
        hooks, keep = nn.modules.module, self._handles.append
        keep(register_optimizer_step_pre_hook(self._step_starts))
        keep(register_optimizer_step_post_hook(self._step_ended))
        keep(hooks.register_module_parameter_registration_hook(self._parameter))
        keep(hooks.register_module_module_registration_hook(self._module))

    def stop(self) -> None:
        self._patches.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.modules(False)
        self.session.over = True

    # the stack of modules, for traced steps

    def modules(self, on: bool) -> None:
        """Follow which module's forward is running; and in scripts, find the models."""
        self.rounds.learns()
        self.rollouts.forget()
        self.session.module_stack.clear()
        self._hook(on)

    def _hook(self, on: bool) -> None:
        for handle in self._module_handles:
            handle.remove()
        self._module_handles.clear()
        if on:
            hooks, keep = nn.modules.module, self._module_handles.append
            keep(hooks.register_module_forward_pre_hook(self._enter_module))
            keep(hooks.register_module_forward_hook(self._leave_module, always_call=True))

    @guarded
    def _enter_module(self, module: nn.Module, args: Any) -> None:
        stack = self.session.module_stack
        if self.rollouts.aside:
            self.rollouts.enters(module, (), {}, outermost=False)
            return
        registry = self.session.registry
        if registry.discover and not stack and next(module.parameters(), None) is not None:
            registry.add_root(registry.top_of(module))
        session = self.session
        if session.record.traced and module not in session.called:
            session.called[module] = session.here()
            session.kinds.add(type(module))
        if not stack and torch.is_grad_enabled():
            self.rounds.learns()
        outermost = not stack and not session.paused  # not what a checkpoint computes again
        if outermost and (session.record.traced or self._peek is not None):
            # torch keeps keyword arguments from hooks of all modules: they are the caller's local
            # (above the guard)
            kwargs = sys._getframe(2).f_locals.get("kwargs") or {}
            self.session.tell("module_starts", module, args, kwargs, self.session.here())
            self.rollouts.enters(module, args, kwargs, outermost=True)
        else:
            self.rollouts.enters(module, (), {}, outermost=False)
        stack.append(module)

    @guarded
    def _leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        aside = self.rollouts.aside
        self.rollouts.leaves(module, result)
        if aside and self.rollouts.aside:
            return
        stack = self.session.module_stack
        while stack and stack.pop() is not module:
            pass  # a forward that raised left its children behind
        traced = self.session.record.traced and not self.session.paused
        if traced and self.session.ledger is not None:
            self.session.ledger.ends.returned(module, result)
        if not stack and traced:
            self.session.tell("module_ends", module, result)
            self.rounds.forward_ended(module)

    # evaluations between two looks

    _peek: Any = None  # the region without gradients that is watched

    def _peek_starts(self, region: Any) -> Iterator[Any]:
        """Which mode an evaluation runs in is seen in its first calls, also in untraced steps."""
        self.rounds.enters(region)
        yield
        session = self.session
        if (
            self._peek is not None
            or session.asleep
            or self._module_handles
            or session.paused
            or self.light
        ):
            return
        site = session.here()
        self._peeks[site] = self._peeks.get(site, 0) + 1
        if self._peeks[site] <= _PEEKS:
            self._peek = region
            self.modules(True)

    def _peek_ends(self, region: Any, *error: Any) -> Iterator[Any]:
        if self.rounds.dozes:
            yield
            self.rounds.exits(region)
        else:
            self.rounds.exits(region)
            yield
        if self._peek is region:
            self._peek = None
            if not self.session.record.traced:
                self.modules(False)

    # torch.compile

    _aside: tuple[bool, int | None, list[Any]] | None = None

    @guarded
    def _compiled(self, inside: bool) -> None:
        """Neither mode nor hooks inside a compiled call; everything as it was after it."""
        stack = self.session.module_stack
        if inside and self._aside is None:
            self.rollouts.forget()
            self.session.compiled.add(self.session.here())
            self.session.compiling = True
            self._aside = (bool(self._module_handles), modes.place(self.trace), list(stack))
            modes.remove(self.trace)
            self.modules(False)
        elif not inside and self._aside is not None:
            hooked, place, running = self._aside
            self._aside = None
            self.session.compiling = False
            if place is not None:
                modes.insert(self.trace, place)
            self.modules(hooked)
            stack.extend(running)

    # hooks

    @guarded
    def _parameter(self, module: nn.Module, name: str, parameter: Any) -> None:
        if isinstance(parameter, Tensor):
            registry = self.session.registry
            registry.constructed(constructors(), self.session.step)
            registry.born(module, parameter, self.session.here(), self.session.step)
            self._phases.grew(module)

    @guarded
    def _module(self, parent: nn.Module, name: str, child: Any) -> None:
        if isinstance(child, nn.Module):
            registry = self.session.registry
            registry.adopted(parent, child)
            registry.made(child, self.session.here(), self.session.step)
            registry.constructed(constructors(), self.session.step)
            self._phases.grew(parent)

    def _backward_ended(self) -> None:
        if not self.light:
            self._phases.went_back()
        self._went_back()

    # optimizer steps

    @guarded
    def _step_starts(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        session = self.session
        if session.registry.discover:
            session.registry.add_optimizer(optimizer)
        with session.pause(), alone():
            if session.record.checked:
                self._updates[id(optimizer)] = steps.before(optimizer, session.values)
        session.add_event("step_starts", optimizer=optimizer)
        self._running.append((optimizer, session.paused))
        session.paused += 1  # an optimizer's own arithmetic is nobody's forward
        if any(map(callable, args[1:])) or callable(kwargs.get("closure")):
            # but the closure of LBFGS is one, with its backward
            seen = functools.partial(self._seen, optimizer)
            args = tuple(seen(a) if k and callable(a) else a for k, a in enumerate(args))
            return args, {k: seen(a) if k == "closure" else a for k, a in kwargs.items()}
        return None

    def _seen(self, optimizer: Any, closure: Any) -> Any:
        if not callable(closure):
            return closure
        return observed(self.session, self, functools.partial(self._closure, optimizer))(closure)

    def _closure(self, optimizer: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        paused, self.session.paused = self.session.paused, 0
        try:
            yield
        finally:
            self.session.paused = paused
        self.session.add_event("closure", optimizer=optimizer)

    @guarded
    def _step_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._left(optimizer)
        before = self._updates.pop(id(optimizer), None)
        with self.session.pause(), alone():
            facts = steps.after(before, self.session.values) if before is not None else None
        self.session.add_event("step", optimizer=optimizer, update=facts)
        if not self.light:
            self._phases.stepped(optimizer)
        self._stepped(optimizer)

    def _step_left(self, block: Any, error: Any, *args: Any) -> Iterator[Any]:
        """A step that raises has no post hook, but its block has an end."""
        if error is not None and self._running and block.name.startswith(_STEP):
            optimizer = self._running[-1][0]
            if block.name == f"{_STEP}{type(optimizer).__name__}.step":
                self._left(optimizer)
                self._updates.pop(id(optimizer), None)
        yield

    def _left(self, optimizer: Any) -> None:
        """The step of an optimizer is over, and of all that ran inside of it."""
        places = [k for k, (running, _) in enumerate(self._running) if running is optimizer]
        if places:
            self.session.paused = self._running[places[-1]][1]
            del self._running[places[-1] :]
