"""The watch: calls of backward, optimizers, scalers and clipping, in the order they happen.

Everything is put back by `stop`. Nothing here changes an argument or a result.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import checkpoint

from gradient_doctor import modes, steps
from gradient_doctor.backwards import Backwards
from gradient_doctor.compiled import Compiled
from gradient_doctor.findings import Site
from gradient_doctor.graph import NodeOrigin, mark_origin
from gradient_doctor.laws import Laws
from gradient_doctor.patches import Patches
from gradient_doctor.session import Session
from gradient_doctor.taint import Cut, Region, Taint, inputs_in, merged, plain, tensors_in
from gradient_doctor.trace import Trace


class Watch:
    """Installs and removes all wrappers and hooks of one session."""

    def __init__(self, session: Session, trace: Trace, stepped: Callable[[Any], None]) -> None:
        self.session = session
        self.trace = trace
        self.backwards = Backwards(session)
        self._stepped = stepped  # told after each optimizer step: scripts find their steps by it
        self._patches = Patches()
        self._handles: list[Any] = []
        self._updates: dict[int, steps.Before] = {}

    def start(self) -> None:
        patch = self._patches.replace
        self.backwards.install(self._patches)
        Laws(self.session).install(self._patches)
        Compiled(self._compiled).install(self._patches)
        patch(nn.Module, "train", self._mode)
        patch(torch.inference_mode, "__enter__", self._inference)
        patch(torch.autograd.Function, "apply", self._function)
        patch(torch, "from_numpy", self._from_numpy)
        patch(torch, "save", _save)
        patch(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        patch(torch.optim.Optimizer, "__init__", self._new_optimizer)
        patch(torch.optim.Optimizer, "load_state_dict", self._load_state)
        patch(torch.optim.lr_scheduler.LRScheduler, "__init__", self._new_scheduler)
        patch(nn.Parameter, "__new__", self._new_parameter)
        patch(nn.Module, "zero_grad", self._zero_grad)
        for namespace in (torch.nn.utils, torch.nn.utils.clip_grad):
            patch(namespace, "clip_grad_value_", self._clip_value)
        # the helper behind clip_grad_norm_: found also when the user imported that name before
        patch(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", self._clip)
        for name in ("scale", "unscale_", "step", "update"):
            patch(torch.amp.GradScaler, name, self._scaler_call(name))
        self._handles = [
            register_optimizer_step_pre_hook(self._step_starts),
            register_optimizer_step_post_hook(self._step_ended),
            nn.modules.module.register_module_parameter_registration_hook(self._parameter),
            nn.modules.module.register_module_module_registration_hook(self._module),
        ]

    def stop(self) -> None:
        self._patches.restore()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.modules(False)

    # the stack of modules, for traced steps

    _module_handles: tuple[Any, ...] = ()

    def modules(self, on: bool) -> None:
        """Follow which module's forward is running; and in scripts, find the models."""
        for handle in self._module_handles:
            handle.remove()
        self._module_handles = ()
        self.session.module_stack.clear()
        if on:
            hooks = nn.modules.module
            self._module_handles = (
                hooks.register_module_forward_pre_hook(self._enter_module),
                hooks.register_module_forward_hook(self._leave_module, always_call=True),
            )

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        stack = self.session.module_stack
        registry = self.session.registry
        if registry.discover and not stack and next(module.parameters(), None) is not None:
            registry.add_root(registry.top_of(module))
        session = self.session
        outermost = not stack and not session.paused  # not what a checkpoint computes again
        if outermost and session.record.traced and session.wants("module_starts"):
            # torch keeps keyword arguments from hooks of all modules: they are the caller's local
            kwargs = sys._getframe(1).f_locals.get("kwargs") or {}
            self.session.tell("module_starts", module, args, kwargs, self.session.here())
        stack.append(module)

    def _leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        stack = self.session.module_stack
        while stack and stack.pop() is not module:
            pass  # a forward that raised left its children behind

    # torch.compile

    _aside: tuple[bool, int | None, list[Any]] | None = None

    def _compiled(self, inside: bool) -> None:
        """Neither mode nor hooks inside a compiled call; everything as it was after it."""
        stack = self.session.module_stack
        if inside and self._aside is None:
            self.session.compiled.add(self.session.here())
            self._aside = (bool(self._module_handles), modes.place(self.trace), list(stack))
            modes.remove(self.trace)
            self.modules(False)
        elif not inside and self._aside is not None:
            hooked, place, running = self._aside
            self._aside = None
            if place is not None:
                modes.insert(self.trace, place)
            self.modules(hooked)
            stack.extend(running)

    # wrappers

    def _mode(self, original: Any) -> Any:
        session = self.session
        running = False

        @functools.wraps(original)
        def train(module: Any, mode: bool = True) -> Any:
            nonlocal running
            if running or session.paused:
                return original(module, mode)
            running = True  # torch asks every child in turn
            try:
                session.add_event("mode", module=weakref.ref(module), training=bool(mode))
                return original(module, mode)
            finally:
                running = False

        return train

    def _inference(self, original: Any) -> Any:
        session = self.session

        @functools.wraps(original)
        def enter(region: Any) -> Any:
            if region.mode and not session.paused:
                session.region = Region("inference_mode", session.here())
            return original(region)

        return enter

    def _function(self, original: Any) -> Any:
        session = self.session

        @functools.wraps(original.__func__)
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if session.paused or not self.trace.on or not session.record.traced:
                return original.__func__(cls, *args, **kwargs)
            session.opaque_depth += 1
            try:
                result = original.__func__(cls, *args, **kwargs)
            finally:
                session.opaque_depth -= 1
            self._opaque(cls, args, kwargs, result)
            return result

        return classmethod(apply)

    def _opaque(self, cls: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Outputs of a custom Function depend on its inputs and on what its forward computed."""
        session = self.session
        inputs, floats = inputs_in(args, kwargs, session.numbers)
        outputs = tensors_in(result)
        site = session.here()
        known = [t for t in map(session.taint_of, inputs) if t is not None]
        known.extend(f.taint for f in floats)
        reentrant = cls is checkpoint.CheckpointFunction
        if reentrant:
            session.add_event("checkpoint", inputs_need_grad=any(t.requires_grad for t in inputs))
        for output in outputs:
            inner = session.taints.get(output)
            depends, live, cuts, opaque = merged([*known, *([inner] if inner else [])])
            if not output.requires_grad and live:
                kind = "checkpoint" if reentrant else "function"
                key = (kind, cls.__name__, site, session.step)
                cut = session.cuts.enter(
                    key, functools.partial(Cut, kind, cls.__name__, site, session.step, 0), live
                )
                live, cuts = 0, cuts | {cut}
            opaque = opaque | {cls.__name__}
            session.taints[output] = Taint(
                depends, live, cuts, site, cls.__name__, session.step, opaque
            )
            mark_origin(output, NodeOrigin(cls.__name__, site, session.step))

    def _from_numpy(self, original: Any) -> Any:
        @functools.wraps(original)
        def from_numpy(array: Any) -> Any:
            tensor = original(array)
            self.trace.from_numpy(array, tensor)
            return tensor

        return from_numpy

    def _new_optimizer(self, original: Any) -> Any:
        @functools.wraps(original)
        def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            registry = self.session.registry
            registry.made(optimizer, self.session.here(), self.session.step)
            registry.first_rates[optimizer] = [g.get("lr") for g in optimizer.param_groups]
            if (
                self.session.registry.discover
                and type(optimizer).__module__ != "accelerate.optimizer"
            ):
                # named later, when the variable that holds it exists
                self.session.registry.unnamed.append(optimizer)

        return init

    def _new_scheduler(self, original: Any) -> Any:
        @functools.wraps(original)
        def init(scheduler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(scheduler, optimizer, *args, **kwargs)
            self.session.registry.scheduled_at[optimizer] = self.session.here()

        return init

    def _new_parameter(self, original: Any) -> Any:
        make = original.__func__  # `__new__` is a static method

        @functools.wraps(make)
        def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
            parameter = make(cls, *args, **kwargs)
            self.session.registry.made(parameter, self.session.here(), self.session.step)
            return parameter

        return staticmethod(new)

    def _load_state(self, original: Any) -> Any:
        @functools.wraps(original)
        def load_state_dict(optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            event = self.session.add_event("load_state", optimizer=optimizer, state=state)
            del event.data["state"]
            return original(optimizer, state, *args, **kwargs)

        return load_state_dict

    def _zero_grad(self, original: Any) -> Any:
        @functools.wraps(original)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> None:
            if isinstance(owner, nn.Module):
                parameters = list(owner.parameters())
            else:
                parameters = [p for group in owner.param_groups for p in group["params"]]
            held = [p for p in parameters if p.grad is not None]
            self.session.add_event("zero_grad", owner=owner, parameters=held)
            with self.session.pause():
                original(owner, *args, **kwargs)

        return zero_grad

    def _clip(self, original: Any) -> Any:
        @functools.wraps(original)
        def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self.session.add_event(
                "clip", parameters=held, max_norm=max_norm, total_norm=total_norm
            )
            with self.session.pause():
                return original(held, max_norm, total_norm, *args, **kwargs)

        return clip

    def _clip_value(self, original: Any) -> Any:
        @functools.wraps(original)
        def clip(parameters: Any, clip_value: Any, *args: Any, **kwargs: Any) -> Any:
            held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self.session.add_event("clip", parameters=held, max_norm=clip_value, total_norm=None)
            with self.session.pause():
                return original(held, clip_value, *args, **kwargs)

        return clip

    def _scaler_call(self, name: str) -> Callable[[Any], Any]:
        kind = {"scale": "scale", "unscale_": "unscale", "step": "scaler_step"}.get(
            name, "scaler_update"
        )

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def method(scaler: Any, *args: Any, **kwargs: Any) -> Any:
                session = self.session
                if session.scaler is None:
                    session.scaler = scaler
                data: dict[str, Any] = {"scaler": scaler, "args": (*args, *kwargs.values())}
                event = session.add_event(kind, **data)
                try:
                    result = original(scaler, *args, **kwargs)
                except Exception as error:
                    event.data["error"] = error
                    session.fail("event_failed", error, event)
                    raise
                event.data["result"] = result
                session.tell("event_ended", event)
                del event.data["result"]
                if kind == "scale":
                    event.data["args"] = ()  # a loss must not live longer than the user's own
                return result

            return method

        return make

    # hooks

    def _parameter(self, module: nn.Module, name: str, parameter: Any) -> None:
        if isinstance(parameter, Tensor):
            self.session.registry.born(module, parameter, self.session.here(), self.session.step)

    def _module(self, parent: nn.Module, name: str, child: Any) -> None:
        if isinstance(child, nn.Module):
            registry = self.session.registry
            registry.adopted(parent, child)
            registry.made(child, self.session.here(), self.session.step)

    def _step_starts(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        session = self.session
        if session.registry.discover:
            session.registry.add_optimizer(optimizer)
        site = session.here()
        with session.pause():
            if session.record.checked:
                self._updates[id(optimizer)] = steps.before(optimizer)
        session.add_event("step_starts", optimizer=optimizer)
        session.paused += 1  # an optimizer's own arithmetic is nobody's forward
        self._site = site
        if any(map(callable, args[1:])) or callable(kwargs.get("closure")):
            # but the closure of LBFGS is one, with its backward
            seen = functools.partial(self._seen, optimizer)
            args = tuple(seen(a) if k and callable(a) else a for k, a in enumerate(args))
            return args, {k: seen(a) if k == "closure" else a for k, a in kwargs.items()}
        return None

    def _seen(self, optimizer: Any, closure: Any) -> Any:
        if not callable(closure):
            return closure

        @functools.wraps(closure)
        def call(*args: Any, **kwargs: Any) -> Any:
            paused, self.session.paused = self.session.paused, 0
            try:
                result = closure(*args, **kwargs)
            finally:
                self.session.paused = paused
            self.session.add_event("closure", optimizer=optimizer)
            return result

        return call

    _site: Site | None = None

    def _step_ended(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        session = self.session
        session.paused = max(0, session.paused - 1)
        before = self._updates.pop(id(optimizer), None)
        with session.pause():
            facts = steps.after(before) if before is not None else None
        session.add_event("step", optimizer=optimizer, update=facts)
        self._stepped(optimizer)


def _save(original: Any) -> Any:
    """Checkpoints hold plain floats: a reduced one is refused by `weights_only`."""

    @functools.wraps(original)
    def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
        return original(plain(obj), *args, **kwargs)

    return save
