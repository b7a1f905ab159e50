"""Tools that are attached to a live loop."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from benchmarks.doctor_tools.base import (
    EXPLODING,
    NO_GRADIENT,
    NOT_FINITE,
    UNCHANGED,
    ZERO_GRADIENT,
    Message,
    Subject,
    run,
)

Attach = Callable[[Mapping[str, nn.Module], Sequence[torch.optim.Optimizer]], None]


@contextlib.contextmanager
def attached(attach: Attach) -> Iterator[None]:
    """Calls `attach` before the first forward pass after an optimizer was made.

    That is where a user would have put the tool's lines: everything is built, nothing has run.
    """
    optimizers: list[torch.optim.Optimizer] = []
    call, init = nn.Module.__call__, torch.optim.Optimizer.__init__
    done = False

    def watched_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        optimizers.append(self)

    def watched_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal done
        if optimizers and not done:
            done = True
            attach(_roots(), optimizers)
        return call(self, *args, **kwargs)

    torch.optim.Optimizer.__init__ = watched_init
    nn.Module.__call__ = watched_call
    try:
        yield
    finally:
        torch.optim.Optimizer.__init__, nn.Module.__call__ = init, call


def _roots() -> dict[str, nn.Module]:
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    inner = {id(child) for module in alive for child in module.children()}
    tops = [m for m in alive if id(m) not in inner and any(True for _ in m.parameters())]
    return {_variable(module, f"module{i}"): module for i, module in enumerate(tops)}


def _variable(module: nn.Module, otherwise: str) -> str:
    """What the script calls it: the user of a tool would give it that name."""
    frame, spaces = sys._getframe(), []
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__":
            spaces.append(frame.f_locals)
        frame = frame.f_back
    for holder in gc.get_referrers(module):
        spaces.append(holder if isinstance(holder, dict) else getattr(holder, "__dict__", {}))
    names = (name for space in spaces for name, value in space.items() if value is module)
    return next((n for n in names if isinstance(n, str) and n != "self"), otherwise)


def _owner(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    mine = {id(p) for p in module.parameters()}
    held = [sum(id(p) in mine for g in o.param_groups for p in g["params"]) for o in optimizers]
    return optimizers[held.index(max(held))]


def _below(module: nn.Module, path: str) -> tuple[str, ...]:
    """The parameters of a submodule that a message names."""
    names = [name for name, _ in module.named_parameters()]
    return tuple(name for name in names if name == path or name.startswith(f"{path}."))


@contextlib.contextmanager
def on_backward(act: Callable[[Any, Callable[..., Any]], Any]) -> Iterator[None]:
    backward = torch.Tensor.backward

    def watched(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return act(self, lambda *_, **__: backward(self, *args, **kwargs))

    torch.Tensor.backward = watched
    try:
        yield
    finally:
        torch.Tensor.backward = backward


TORCH_AUDIT = {
    "TA100": NOT_FINITE, "TA102": EXPLODING, "TA103": ZERO_GRADIENT, "TA104": NO_GRADIENT,
    "TA105": ZERO_GRADIENT, "TA500": (5,),
}  # fmt: skip


def torch_audit(subject: Subject) -> list[Message]:
    """`autopatch` on every model with its optimizer."""
    autopatch = import_module("torch_audit").autopatch
    auditors: dict[str, Any] = {}

    def attach(modules: Mapping[str, nn.Module], optimizers: Sequence[Any]) -> None:
        for name, module in modules.items():
            owner = _owner(module, optimizers)
            auditors[name] = autopatch(module, optimizer=owner, every_n_steps=1, reporters=[])

    with attached(attach):
        run(subject.script)
    found = []
    for root, auditor in auditors.items():
        weights = dict(auditor.model.named_parameters())
        for finding in auditor.findings:
            path = finding.module_path or ""
            kind, _, name = (finding.entity or "").partition(":")
            names = _below(auditor.model, path)
            if kind in ("param", "grad") and name:
                names = (name if path == "global" else f"{path}.{name}",)
            elif finding.rule_id == "TA104":  # about the whole model that this auditor watches
                names = tuple(n for n, p in weights.items() if p.requires_grad) or tuple(weights)
            kinds = TORCH_AUDIT.get(finding.rule_id, ())
            alarm = str(finding.severity.value).upper() != "INFO"
            names = tuple(f"{root}.{name}" for name in names)
            found.append(Message(finding.rule_id, finding.message, kinds, names, alarm=alarm))
    return found


def torcheck(subject: Subject) -> list[Message]:
    """Every parameter must change in every step and stay finite."""
    tool = import_module("torcheck")
    found = []

    def attach(modules: Mapping[str, nn.Module], optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            tool.register(optimizer)
        held = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
        for name, module in modules.items():
            for path, weight in module.named_parameters():
                if not weight.requires_grad and id(weight) not in held:
                    continue
                try:
                    tool.add_tensor(
                        weight, path, name, changing=True, check_nan=True, check_inf=True
                    )
                except RuntimeError as error:
                    found.append(Message("no optimizer", str(error), (7,), (f"{name}.{path}",)))

    with attached(attach):
        error = run(subject.script)
    rules = r"Module (\S+)'s (\S+) (should change|contains NaN|contains inf)"
    for root, path, rule in re.findall(rules, str(error)):
        name = f"{root}.{path}"
        kinds = UNCHANGED if rule == "should change" else NOT_FINITE
        found.append(Message(rule, f"{name} {rule}", kinds, (name,)))
    return found


NEURALDBG = {
    "vanishing": ZERO_GRADIENT, "exploding": EXPLODING, "dead": ZERO_GRADIENT,
    "saturated": ZERO_GRADIENT, "anomalous": NOT_FINITE, "nan_detected": NOT_FINITE,
    "inf_detected": NOT_FINITE,
}  # fmt: skip


def neuraldbg(subject: Subject) -> list[Message]:
    """The context manager around the loop, `record_loss` at every backward. Core edition."""
    tool, watchers = import_module("neuraldbg").NeuralDbg, {}

    def attach(modules: Mapping[str, nn.Module], optimizers: Sequence[Any]) -> None:
        watchers.update({name: tool(module).__enter__() for name, module in modules.items()})
        optimizers[-1].register_step_post_hook(
            lambda *_: [watcher.step_iteration() for watcher in watchers.values()]
        )

    def backward(loss: torch.Tensor, original: Callable[..., Any]) -> None:
        original()
        for watcher in watchers.values() if loss.numel() == 1 else ():
            watcher.record_loss(float(loss.detach()))

    found = []
    with warnings.catch_warnings(), attached(attach), on_backward(backward):
        warnings.simplefilter("ignore")
        run(subject.script)
        for root, watcher in watchers.items():
            watcher.__exit__(None, None, None)
            for event in watcher.events:
                state = str(event.to_state)
                if state in ("healthy", "normal", "stable"):
                    continue
                path = event.layer_name.partition("_")[2]
                text = f"{event.event_type.value}: {state} at {event.layer_name}"
                rule = f"{event.event_type.value} {state}"
                names = tuple(f"{root}.{name}" for name in _below(watcher.model, path))
                found.append(Message(rule, text, NEURALDBG.get(state, ()), names))
    return found


GRADTRACER = {
    "STAGNATION": UNCHANGED, "GRADIENT_EXPLOSION": EXPLODING, "VELOCITY_EXPLOSION": EXPLODING,
    "DEAD NEURONS": ZERO_GRADIENT,
}  # fmt: skip


def gradtracer(subject: Subject) -> list[Message]:
    """A FlowTracker per model, stepped with the loss after every optimizer step; its report."""
    tool = import_module("gradtracer").FlowTracker
    report = import_module("gradtracer.diagnostics").generate_dl_report
    trackers, losses = {}, [0.0]

    def attach(modules: Mapping[str, nn.Module], optimizers: Sequence[Any]) -> None:
        trackers.update({n: tool(module, include_bias=True) for n, module in modules.items()})
        optimizers[-1].register_step_post_hook(
            lambda *_: [tracker.step(loss=losses[-1]) for tracker in trackers.values()]
        )

    def backward(loss: torch.Tensor, original: Callable[..., Any]) -> None:
        original()
        losses.append(float(loss.detach().sum()))

    with attached(attach), on_backward(backward):
        run(subject.script)
    found = []
    for root, tracker in trackers.items():
        if tracker.store.num_steps:
            for rule, name in re.findall(r"([A-Z_ ]+): '(.+)'", report(tracker.store, top_k=10**6)):
                kinds = GRADTRACER.get(rule.strip(), ())
                text = f"{rule.strip()}: {name}"
                found.append(Message(rule.strip(), text, kinds, (f"{root}.{name}",)))
    return found
