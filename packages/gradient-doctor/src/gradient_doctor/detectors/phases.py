"""Class 26: train() and eval() modes that do not fit what is being done."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument
from gradient_doctor.dropout_calls import passes_mode
from gradient_doctor.findings import Severity, Site
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session, StepRecord
from gradient_doctor.sites import calling_frame
from gradient_doctor.slips import surroundings
from gradient_doctor.taint import tensors_in

_EVALUATION = re.compile(
    r"(^|_)(eval|evaluate|evaluation|valid|validate|validation|test|accuracy|score)(_|$)"
)
# not `val` or `test` alone: a value, a device and an attempt have such names, too
_HELD_OUT = re.compile(
    r"(?<![a-z_])(val|valid|validation|test|eval)_?(loader|set|data|ds|batch|x|inputs)(?![a-z])"
    r"|(?<![a-z])(xs?|inputs|data|loader|batch)_(val|valid|validation|test|eval)(?![a-z])"
)


def _drops(call: OpCall) -> bool:
    return bool(argument(call, 2, "training", True)) and argument(call, 1, "p", 0.5) > 0


# functions that drop at random, and whether a call of them does
_DROPS: dict[str, Callable[[OpCall], bool]] = {
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), _drops),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), _drops),
    "scaled_dot_product_attention": lambda call: argument(call, 4, "dropout_p", 0.0) > 0,
}
_SCORES = {
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
}
_GUESSES = {"argmax", "max", "topk", "round", "gt", "ge", "__gt__", "__ge__"}


@dataclass
class Forward:
    """The last forward with gradients of an outermost module in this step."""

    training: bool
    site: Site | None


class Phases(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._switches: dict[int, tuple[Site | None, int]] = {}  # id of a module: its last eval()
        # id of a module: its last train(), if nothing has been learnt since
        self._woken: dict[int, Site | None] = {}
        self._forwards: dict[str, Forward] = {}
        self._trained: set[str] = set()  # roots that a forward in train mode was seen of
        # in eval at a backward of a step that is not checked: told when their optimizer steps
        self._suspects: dict[str, int] = {}
        # what a model in train() gave without gradients -> the call, and what is active in it
        self._outputs = WeakIdKeyDictionary()
        self._running: tuple[nn.Module, Site] | None = None  # such a forward
        self._learnt = WeakIdKeyDictionary()  # inputs of forwards with gradients
        self._guesses = WeakIdKeyDictionary()  # classes made of such outputs
        # calls of functional dropout that do not pass the mode on, by line: the model they are of
        self._always: dict[Site, Any] = {}
        self._in_eval: dict[Site, Any] = {}  # those whose model was switched to eval() since

    def op(self, call: OpCall) -> None:
        """`F.dropout(x)` drops in eval() as well: its `training` is True unless it is passed."""
        self._follow(call)
        stack = self.session.module_stack
        if call.short not in _DROPS or call.site is None or not stack:
            return
        if call.site in self._always or not _DROPS[call.short](call):
            return
        if type(stack[-1]).__module__.startswith("torch.nn"):
            # a layer knows its own mode; one that is made in forward is not told that of the model
            strange = all(part is not stack[-1] for part in stack[0].modules())
            ignores = strange and not passes_mode(call.site)
        else:  # of a library's layer the line is not the call's, as in code that it has made
            ignores = calling_frame() is not None and not passes_mode(call.site)
        if ignores:
            self._always[call.site] = weakref.ref(stack[0])
            if not stack[0].training:
                self._drops_in_eval(call.site)

    # evaluations without eval()

    def module_ends(self, module: nn.Module, result: Any) -> None:
        running, self._running = self._running, None
        if running is not None and running[0] is module:
            for output in tensors_in(result):
                self._outputs[output] = running

    def _follow(self, call: OpCall) -> None:
        """A prediction that is compared with an answer, while nothing is learnt, is a score."""
        if not self._outputs or torch.is_grad_enabled() or not call.inputs:
            return
        running = next((self._outputs[t] for t in call.inputs if t in self._outputs), None)
        if running is None:
            return
        module, site = running
        guessed = any(t in self._guesses for t in call.inputs)
        if call.short in _SCORES or (call.short in ("eq", "ne", "__eq__", "__ne__") and guessed):
            name = self._root(module)
            if name is not None and len(call.inputs) > 1:
                self._evaluated(module, name, site)
            return
        for output in call.outputs:
            self._outputs[output] = running
            if guessed or call.short in _GUESSES:
                self._guesses[output] = True

    def _drops_in_eval(self, site: Site) -> None:
        self.report(
            26,
            Severity.WARNING,
            "Functional dropout is active in eval() mode.",
            why="It is called without the module's mode, which functions do not know: evaluation "
            "drops at random as training does.",
            fix="Pass training=self.training (for attention: dropout_p=p if self.training else "
            "0.0), or use nn.Dropout.",
            site=site,
        )

    def event(self, event: Event) -> None:
        if event.kind == "step" and self._suspects:
            # a model of an earlier fold or phase stays in eval, and nobody trains it
            registry = self.session.registry
            theirs = registry.bits(owned_by(event.data["optimizer"]))
            for name, bits in self._suspects.items():
                if bits & theirs and name in registry.roots:
                    self._trains_in_eval(registry.roots[name], name, bits, None)
        if event.kind != "mode":
            return
        module = event.data["module"]()
        if module is not None and not event.data["training"]:
            for site, model in self._always.items():
                if any(model() is part for part in module.modules()):
                    self._in_eval[site] = model
        for part in module.modules() if module is not None else ():
            if event.data["training"]:
                self._switches.pop(id(part), None)
                self._woken[id(part)] = event.site
            else:
                self._woken.pop(id(part), None)
                self._switches[id(part)] = (event.site, event.step)

    def step_ended(self, record: StepRecord) -> None:
        self._suspects.clear()

    def backward_starts(self, backward: Backward) -> None:
        self._evaluation_ended()
        self._woken.clear()

    def finish(self, error: BaseException | None) -> None:
        self._evaluation_ended()

    def _evaluation_ended(self) -> None:
        for site in self._in_eval:
            self._drops_in_eval(site)
        self._in_eval.clear()

    def _evaluates_parts(self, module: nn.Module) -> None:
        """A denoiser's forward corrupts its input, and evaluation asks its encoder alone."""
        for site, model in list(self._in_eval.items()):
            whole = model()
            parts = () if whole is None or whole is module else whole.modules()
            if whole is None or any(part is module for part in parts):
                del self._in_eval[site]

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, site: Site | None) -> None:
        if self._in_eval:
            self._evaluates_parts(module)
        name = self._root(module)
        if name is None:
            return
        inputs = tensors_in([args, kwargs], depth=4)
        if torch.is_grad_enabled():
            self._forwards[name] = Forward(module.training, site)
            for tensor in inputs:
                self._learnt[tensor] = True
        elif module.training and site is not None:
            if _is_evaluation(site):
                self._evaluated(module, name, site)
            elif _active_parts(module) and not any(t in self._learnt for t in inputs):
                self._running = (module, site)

    def _root(self, module: nn.Module) -> str | None:
        """The root that this is, or is a part of."""
        path = self.session.registry.module_name(module)
        return None if path.startswith("<") else path.split(".", 1)[0]

    def backward_ended(self, backward: Backward) -> None:
        registry = self.session.registry
        checked = self.session.record.checked
        for name, root in registry.roots.items():
            # the usual slip comes with the first evaluation, between two looks
            if not checked and (root.training or name not in self._trained):
                self._suspects.pop(name, None)
                continue
            seen = self._forwards.get(name)
            # without a trace only the mode of this moment is known
            training = seen.training if seen is not None else root.training
            theirs = registry.bits(p for p in root.parameters() if p.requires_grad)
            theirs &= backward.received if checked else registry.owned
            if not theirs:
                continue
            if training:
                self._trained.add(name)
                if self.session.contract.get("phase") == "eval":
                    self._not_eval(root, name, theirs, seen)
                else:
                    self._inside_in_eval(root, name, theirs, seen)
            elif checked:
                self._trains_in_eval(root, name, theirs, seen)
            else:
                self._suspects[name] = theirs
        self._forwards.clear()

    def _trains_in_eval(self, root: nn.Module, name: str, bits: int, seen: Forward | None) -> None:
        contract = self.session.contract.get("phase")
        if contract == "eval":
            return
        parts = _active_parts(root)
        switch = self._switches.get(id(root))
        turned = name in self._trained  # it was in train mode in an earlier step
        severity = Severity.WARNING if parts or contract == "train" else Severity.NOTE
        self.report(
            26,
            severity,
            f"{name} is trained in eval() mode"
            + (", into which it was switched in the middle of training." if turned else "."),
            why=(
                f"{_told(parts)} behave as in evaluation: no dropout, no batch statistics."
                if parts
                else "It has no part that depends on the mode, so nothing changes today."
            ),
            fix="Call .train() before the training step, and again after every evaluation."
            if switch is not None
            else "Call .train() before training; models loaded from a file start in eval().",
            site=switch[0] if switch is not None else (seen.site if seen is not None else None),
            parameters=bits,
            related=(seen.site if seen is not None else None,),
        )

    def _inside_in_eval(self, root: nn.Module, name: str, bits: int, seen: Forward | None) -> None:
        """The root says train(), but every dropout below it was switched to eval()."""
        active = [part for part in root.modules() if _kind_of(part) == "dropout"]
        if not active or any(part.training for part in active):
            return
        # batch statistics are often frozen on purpose; dropout that never drops is a slip
        switches = [self._switches[id(part)] for part in active if id(part) in self._switches]
        self.report(
            26,
            Severity.WARNING,
            f"{name} is in train() mode, but all of its dropout is in eval().",
            why=f"{_told(_active_parts(root, dropout_only=True))} below it do nothing: a part of "
            f"{name} was switched to eval(), or was made so, after {name} itself.",
            fix=f"Call {name}.train() on the whole, after everything is put together; or set the "
            "rate to 0 if no dropout is meant.",
            site=switches[0][0] if switches else (seen.site if seen is not None else None),
            parameters=bits,
            related=(seen.site if seen is not None else None,),
        )

    def _not_eval(self, root: nn.Module, name: str, bits: int, seen: Forward | None) -> None:
        self.report(
            26,
            Severity.WARNING,
            f"{name} is in train() mode, but the contract says that this phase is eval.",
            why=f"{_told(_active_parts(root)) or 'Parts that depend on the mode'} are active.",
            fix="Call .eval() before, or change the contract's phase.",
            site=seen.site if seen is not None else None,
            parameters=bits,
        )

    def _evaluated(self, module: nn.Module, name: str, site: Site) -> None:
        parts = _active_parts(module)
        if not parts:
            return
        random = bool(_active_parts(module, dropout_only=True))
        woken = self._woken.get(id(module))
        # train() in the evaluation itself is the line to change
        if (
            woken is None
            or site.function.startswith("<")
            or (woken.file, woken.function) != (site.file, site.function)
        ):
            woken = site
        where = "" if site.function.startswith("<") else f", in {site.function}()"
        self.report(
            26,
            Severity.WARNING,
            f"{name} is evaluated in train() mode{where}.",
            why=f"{_told(parts)} are active: "
            + (
                "the numbers are random, and those of another model."
                if random
                else "each batch is normalised by its own statistics, and the running ones take "
                "them in as if they were training data."
            ),
            fix="Call .eval() before the evaluation and .train() after it.",
            site=woken,
            related=(site,),
            parameters=self.session.registry.bits(
                p for p in module.parameters() if p.requires_grad
            ),
        )


def _active_parts(root: nn.Module, dropout_only: bool = False) -> dict[str, int]:
    """Kinds of modules whose behaviour depends on the mode, and how many there are."""
    counts: dict[str, int] = {}
    for part in root.modules():
        kind = _kind_of(part)
        if kind == "dropout" or (kind == "batch_norm" and not dropout_only):
            counts[type(part).__name__] = counts.get(type(part).__name__, 0) + 1
    return counts


def _kind_of(part: nn.Module) -> str | None:
    """`dropout` or `batch_norm`, for a module that is another one in eval()."""
    if isinstance(part, nn.modules.batchnorm._BatchNorm):
        return "batch_norm"
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return "dropout" if part.p > 0 else None
    # attention modules of common libraries keep the rate as a number
    rates = (getattr(part, name, 0.0) for name in ("attention_dropout", "dropout_p"))
    return "dropout" if max(map(_number, rates)) > 0 else None


def _is_evaluation(site: Site) -> bool:
    """Whether the program itself calls this an evaluation: the function, or the data."""
    if _EVALUATION.search(site.function.lower()):
        return True
    return _HELD_OUT.search(surroundings(site).lower()) is not None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _told(parts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in parts.items())
