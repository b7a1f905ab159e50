"""Calls that matter for the order of things, or pass by the trace: observed, see guards.py."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from gradient_doctor.graph import NodeOrigin, mark_origin
from gradient_doctor.guards import observed
from gradient_doctor.patches import Patches
from gradient_doctor.session import Session
from gradient_doctor.sites import called_by_torch, called_by_user, constructors, user_lines
from gradient_doctor.taint import Cut, Region, Taint, merged, tensors_in
from gradient_doctor.trace import Trace

_SCALER = {
    "scale": "scale",
    "unscale_": "unscale",
    "step": "scaler_step",
    "update": "scaler_update",
}


class Calls:
    """Observers of modes, custom Functions, optimizers, gradient scalers and clipping."""

    def __init__(self, session: Session, trace: Trace) -> None:
        self.session = session
        self.trace = trace
        self._switching = False  # `train` asks every child in turn
        self._listing = False

    def install(self, patches: Patches) -> None:
        def patch(
            owner: Any, name: str, observe: Callable[..., Iterator[Any]], rests: bool = False
        ) -> None:
            patches.replace(owner, name, observed(self.session, self, observe, rests=rests))

        patch(nn.Module, "train", self._mode)
        patch(torch.inference_mode, "__enter__", self._inference)
        patch(torch.set_grad_enabled, "__init__", self._grad_enabled, rests=True)
        patch(torch, "from_numpy", self._from_numpy, rests=True)
        patch(torch.optim.Optimizer, "zero_grad", self._zero_grad)
        patch(torch.optim.Optimizer, "__init__", self._new_optimizer)
        patch(torch.optim.Optimizer, "load_state_dict", self._load_state)
        patch(torch.nn.modules.loss._Loss, "__init__", self._new_loss)
        patch(torch.optim.lr_scheduler.LRScheduler, "__init__", self._new_scheduler)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau  # does not call the other's
        patch(plateau, "__init__", self._new_scheduler)
        for scheduler in _schedulers():
            patch(scheduler, "step", self._schedule)
        patch(nn.Module, "named_parameters", self._named)
        patch(torch.Tensor, "requires_grad_", self._switched, rests=True)
        patch(nn.Module, "zero_grad", self._zero_grad)
        patch(nn.Module, "load_state_dict", self._load_module)
        # the helper behind clip_grad_norm_: found also when the user imported that name before
        for namespace, name, observe in (
            (torch.nn.utils.clip_grad, "_clip_grads_with_norm_", self._clip),
            (torch.nn.utils.clip_grad, "clip_grad_value_", self._clip_value),
            (torch.nn.utils, "clip_grad_value_", self._clip_value),
        ):
            patch(namespace, name, observe)
            patches.replace(namespace, name, _listed)
        for name, kind in _SCALER.items():
            patch(torch.amp.GradScaler, name, functools.partial(self._scaler, kind))
        patches.replace(torch.autograd.Function, "apply", self._function)
        patches.replace(nn.Parameter, "__new__", self._new_parameter)
        patch(nn.Parameter, "__deepcopy__", self._copied)

    # modes

    def _mode(self, module: Any, mode: bool = True) -> Iterator[Any]:
        if self._switching or self.session.paused:
            return
        self._switching = True
        try:
            self.session.add_event("mode", module=weakref.ref(module), training=bool(mode))
            yield
        finally:
            self._switching = False

    def _switched(self, tensor: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Between two looks: a parameter is frozen, or thawed, by this call."""
        if self.session.record.traced or self.session.paused:
            return
        if not isinstance(tensor, nn.Parameter):
            return
        yield
        self.session.registry.switched(tensor, self.session.here, user_lines)

    def _named(self, module: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """A loop of the user's over names; torch and we ask for them far more often."""
        if not self._listing and not self.session.paused and called_by_user():
            self._listing = True
            try:
                names = [name for name, _ in module.named_parameters(*args, **kwargs)]
                self.session.add_event("named", names=names)
            finally:
                self._listing = False
        yield

    def _inference(self, region: Any) -> Iterator[Any]:
        if region.mode and not self.session.paused:
            site = self.session.entering or self.session.here()
            self.session.region = Region("inference_mode", site)
            self.session.inference_at = site
        yield

    def _grad_enabled(self, region: Any, mode: bool) -> Iterator[Any]:
        """As a function it stays; between two looks nobody else sees it."""
        if not mode and not self.session.paused:
            self.session.grad_off_at = self.session.entering or self.session.here()
            self.session.grad_off_by = "no_grad" if self.session.entering is not None else ""
        yield

    # custom Functions

    def _function(self, original: Any) -> Any:
        return classmethod(observed(self.session, self, self._applied)(_unbound(original)))

    def _applied(self, cls: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        session = self.session
        if session.paused or not self.trace.on or not session.record.traced or session.asleep:
            return
        session.opaque_depth += 1
        try:
            result = yield
        finally:
            session.opaque_depth -= 1
        self._opaque(cls, args, kwargs, result)

    def _opaque(self, cls: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Outputs of a custom Function depend on its inputs and on what its forward computed."""
        session = self.session
        inputs, numbers = session.numbers.among(args, kwargs)
        outputs = tensors_in(result)
        site = session.here()
        taints = [t for t in map(session.taint_of, inputs) if t is not None]
        taints.extend(number.taint for number in numbers)
        reentrant = cls is checkpoint.CheckpointFunction
        if reentrant:
            session.add_event("checkpoint", inputs_need_grad=any(t.requires_grad for t in inputs))
        for output in outputs:
            inner = session.taints.get(output)
            depends, live, cuts, opaque = merged([*taints, *([inner] if inner else [])])
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

    # in and out of torch

    def _from_numpy(self, array: Any) -> Iterator[Any]:
        tensor = yield
        self.trace.from_numpy(array, tensor)
        if tensor.is_floating_point() and tensor.dtype != torch.get_default_dtype():
            self.session.registry.arrays_at[tensor] = self.session.here()

    # what is made

    def _new_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield
        registry = self.session.registry
        registry.made(optimizer, self.session.here(), self.session.step)
        registry.first_rates[optimizer] = [g.get("lr") for g in optimizer.param_groups]
        if registry.discover and type(optimizer).__module__ != "accelerate.optimizer":
            registry.unnamed.append(optimizer)  # named later, when its variable exists

    def _new_loss(self, loss: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """A loss has no parameters: nothing else would tell where its options are written."""
        running = constructors()
        if all(module is not loss for module, _ in running):  # it has no constructor of its own
            running = [(loss, user_lines()), *running]
        self.session.registry.constructed(running, self.session.step)
        yield

    def _new_scheduler(
        self, scheduler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Iterator[Any]:
        yield
        self.session.registry.scheduled_at[optimizer] = self.session.here()

    def _schedule(self, scheduler: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """A scheduler's first step is its own, and one that is made of others steps them."""
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is None or called_by_torch():
            return
        metric = args[0] if args else kwargs.get("metrics")
        self.session.add_event(
            "schedule",
            scheduler=scheduler,
            optimizer=optimizer,
            by_user=called_by_user(),
            metric=float(metric) if isinstance(metric, (int, float, Tensor)) else None,
        )
        yield

    def _new_parameter(self, original: Any) -> Any:
        make = original.__func__  # `__new__` is a static method
        return staticmethod(observed(self.session, self, self._parameter)(make))

    def _parameter(self, cls: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        parameter = yield
        registry = self.session.registry
        registry.made(parameter, self.session.here(), self.session.step)
        data = args[0] if args else kwargs.get("data")
        # before there is an optimizer, values are taken over to begin with
        if isinstance(data, Tensor) and (registry.optimizers or registry.unnamed):
            self.trace.remade(parameter, data)

    def _copied(self, original: Any, memo: Any) -> Iterator[Any]:
        parameter = yield
        self.session.registry.copied(parameter, original)

    # optimizers, clipping, scalers

    def _load_state(
        self, optimizer: Any, state_dict: Any, *args: Any, **kwargs: Any
    ) -> Iterator[Any]:
        event = self.session.add_event("load_state", optimizer=optimizer, state=state_dict)
        del event.data["state"]
        yield

    def _load_module(self, module: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        state = args[0] if args else kwargs.get("state_dict")
        own = _is_own_state(module, state)
        yield
        if not self.session.paused:
            self.session.add_event("load_module", module=weakref.ref(module), own=own)

    def _zero_grad(self, owner: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if isinstance(owner, nn.Module):
            parameters = list(owner.parameters())
        else:
            parameters = [p for group in owner.param_groups for p in group["params"]]
        held = [p for p in parameters if p.grad is not None]
        self.session.add_event("zero_grad", owner=owner, parameters=held)
        with self.session.pause():
            yield

    def _clip(
        self, parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any
    ) -> Iterator[Any]:
        held = [parameters] if isinstance(parameters, Tensor) else parameters
        self.session.add_event("clip", parameters=held, max_norm=max_norm, total_norm=total_norm)
        with self.session.pause():
            yield

    def _clip_value(
        self, parameters: Any, clip_value: Any, *args: Any, **kwargs: Any
    ) -> Iterator[Any]:
        return self._clip(parameters, clip_value, None)

    def _scaler(self, kind: str, scaler: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        session = self.session
        if session.scaler is None:
            session.scaler = scaler
        data: dict[str, Any] = {"scaler": scaler, "args": (*args, *kwargs.values())}
        event = session.add_event(kind, **data)
        try:
            result = yield
        except Exception as error:
            event.data["error"] = error
            session.fail("event_failed", error, event)
            raise
        event.data["result"] = result
        session.tell("event_ended", event)
        del event.data["result"]
        if kind == "scale":
            event.data["args"] = ()  # a loss must not live longer than the user's own


def _is_own_state(module: nn.Module, state: Any) -> bool:
    """Whether a state consists of the module's very own tensors."""
    if not isinstance(state, dict) or not state:
        return False
    mine = dict(module.named_parameters(remove_duplicate=False))
    given = {name: value for name, value in state.items() if name in mine}
    return bool(given) and all(
        isinstance(value, Tensor) and value.numel() and value.data_ptr() == mine[name].data_ptr()
        for name, value in given.items()
    )


def _schedulers() -> list[type]:
    """torch's schedulers that have a `step` of their own."""
    base = torch.optim.lr_scheduler.LRScheduler
    kinds = vars(torch.optim.lr_scheduler).values()
    return [
        kind
        for kind in kinds
        if isinstance(kind, type) and issubclass(kind, base) and "step" in vars(kind)
    ]


def _unbound(method: Any) -> Callable[..., Any]:
    """A class method as a function of the class: in torch 2.15 `Function.apply` is one of C."""
    if isinstance(method, classmethod):
        return method.__func__

    @functools.wraps(method)
    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, cls)(*args, **kwargs)

    return call


def _listed(original: Any) -> Any:
    """`parameters` may be a generator, which can be gone through only once: by us or by torch."""

    @functools.wraps(original)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        held = parameters if isinstance(parameters, Tensor) else list(parameters)
        return original(held, *args, **kwargs)

    return clip
