"""Class 9: gradients that are erased before the optimizer of their parameters has stepped."""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradient_doctor.detectors.places import count
from gradient_doctor.findings import Severity, Site
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session, StepRecord
from gradient_doctor.slips import surroundings

_BY_NAME = re.compile(r"\bif\b.*(\bin\b|[\"'])")


@dataclass
class Written:
    """Gradients that one backward wrote and that nobody has used yet."""

    site: Site | None
    waiting: int
    received: int  # all of them
    served: bool = False  # another optimizer has stepped with gradients of this backward
    read: int = 0  # the user's own code has looked at these


@dataclass
class Loss:
    """Gradients of one line, erased by another line."""

    erased_at: Site | None
    written_at: Site | None
    bits: int = 0
    steps: set[int] = field(default_factory=set)
    said: Severity | None = None
    # always a by-product: the backward was for another optimizer, as in adversarial training, or
    # the user's own code had read gradients of it, as attacks, sharpness-aware steps and gradient
    # surgery do
    by_product: bool = True
    replaced: int = 0  # a gradient of the program's own making came in their place


class Erased(Detector):
    """Follows each gradient from the backward that wrote it to the step, or zero_grad, after it."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._written: list[Written] = []
        self._losses: dict[tuple[Site | None, Site | None], Loss] = {}
        # backwards since the last step, in steps in which nobody looks at gradients
        self._unchecked: set[Site | None] = set()
        self._used = 0  # parameters that some step has found a gradient for
        self._steps: Counter[int] = Counter()

    def backward_starts(self, backward: Backward) -> None:
        for written in self._written:
            written.read |= written.received & self.session.read_since_backward

    def backward_ended(self, backward: Backward) -> None:
        if backward.kind == "backward" and not self.session.record.checked:
            self._unchecked.add(backward.site)
        if backward.kind == "backward" and backward.received:
            self._written.append(Written(backward.site, backward.received, backward.received))

    def op(self, call: OpCall) -> None:
        # `p.grad.zero_()`; the optimizer's own goes by the watch
        if call.short == "zero_" and call.inputs and not call.inputs[0].requires_grad:
            target = call.inputs[0]
            for parameter in self.session.registry.everything():
                if parameter.grad is target:
                    self._erase([parameter], call.site, by_hand=True)
                    return

    def event(self, event: Event) -> None:
        if event.kind == "zero_grad":
            self._again(event.site)
            self._erase(event.data["parameters"], event.site)
        elif event.kind == "grad_set":
            parameter = event.data["parameter"]
            if event.data["empty"]:
                self._erase([parameter], event.site, by_hand=True)
            else:
                # replaced by what the user's own code made of it
                bit = self.session.registry.bit(parameter)
                self._forget(bit)
                for loss in self._losses.values():
                    if loss.bits & bit and self.session.step in loss.steps:
                        loss.replaced |= bit
                self._written.append(Written(event.site, bit, bit))
        elif event.kind == "step":
            optimizer = event.data["optimizer"]
            self._steps[id(optimizer)] += 1
            self._use(optimizer)
        elif event.kind == "closure":
            self._use(event.data["optimizer"])
        elif event.kind == "scaler_step" and event.data["args"]:
            # a scaler may skip the step: that is its decision, not an erasure
            self._use(event.data["args"][0])

    def _again(self, site: Site | None) -> None:
        """In a step that is not looked at: what was seen once at these two lines happens again."""
        for (erased_at, written_at), loss in self._losses.items():
            if erased_at == site and written_at in self._unchecked and not loss.by_product:
                loss.steps.add(self.session.step)
                self._unchecked.discard(written_at)

    def _use(self, optimizer: Any) -> None:
        self._unchecked.clear()
        if not self._written:
            return
        owned = self.session.registry.bits(owned_by(optimizer))
        for written in self._written:
            if written.waiting & owned:
                self._used |= written.waiting & owned
                written.waiting &= ~owned
                written.served = True
        self._written = [w for w in self._written if w.waiting]

    def _forget(self, bits: int) -> None:
        for written in self._written:
            written.waiting &= ~bits

    def _erase(self, parameters: list[Tensor], site: Site | None, by_hand: bool = False) -> None:
        registry = self.session.registry
        owned = registry.owned if self._written else 0
        erased = registry.bits(parameters) & owned
        for written in self._written:
            lost = written.waiting & erased
            if not lost:
                continue
            written.waiting &= ~lost
            loss = self._losses.setdefault((site, written.site), Loss(site, written.site))
            loss.bits |= lost
            loss.steps.add(self.session.step)
            read = written.read | written.received & self.session.read_since_backward
            if by_hand:
                read &= ~owned  # it begins with reading them: that alone proves nothing
            untraced = not self.session.record.traced  # then nobody knows who has read what
            loss.by_product &= written.served or bool(read) or untraced
        self._written = [w for w in self._written if w.waiting]

    def step_ended(self, record: StepRecord) -> None:
        if record.checked and self.session.age + 1 >= self.session.trace_steps:
            self._judge(least=2)

    def finish(self, error: BaseException | None) -> None:
        self._judge(least=1)

    def _judge(self, least: int) -> None:
        registry = self.session.registry
        stepped = registry.bits(
            p
            for optimizer in registry.optimizers.values()
            if self._steps[id(optimizer)] >= least
            for p in owned_by(optimizer)
        )
        for loss in self._losses.values():
            if loss.bits & stepped:  # an optimizer that never steps is class 21
                loss.by_product |= not loss.bits & ~loss.replaced
                self._say(loss, loss.bits & stepped & ~self._used)

    def _beside(self, bits: int) -> int:
        """All parameters of the optimizers that hold these, and that step for others as well."""
        registry = self.session.registry
        owned = [registry.bits(owned_by(one)) for one in registry.optimizers.values()]
        return functools.reduce(operator.or_, (o for o in owned if o & self._used & ~bits), 0)

    def _say(self, loss: Loss, never: int) -> None:
        registry = self.session.registry
        owners = sorted({o for p in registry.tensors(loss.bits) for o in registry.owners(p)})
        many = registry.many(loss.bits)
        what = f"The gradients of {many} are erased before their optimizer steps."
        why = (
            f"The backward at {loss.written_at} wrote them, and this line erased them "
            f"in {count(len(loss.steps), 'step')} before {' or '.join(owners)} stepped."
        )
        fix = (
            "Call zero_grad before the first backward of a step (or after the step), and only once."
        )
        if _picked_by_name(loss.erased_at) and not loss.bits & ~self._beside(loss.bits):
            severity = Severity.NOTE
            why += " A loop picks them by name, and the others step: a freeze, most likely."
        elif never:
            severity = Severity.ERROR
            why += f" {len(registry.names(never))} of them have never been stepped with a gradient."
        elif loss.by_product or len(loss.steps) < 2:
            severity = Severity.NOTE
            why += (
                " They do train, by another backward; and the erased gradients had served another "
                "optimizer's step or code that read them, were replaced by the program's own, or "
                "it happened once. It may be meant."
            )
        else:
            severity = Severity.WARNING
            why += " They do train, but by another backward only: this one is lost for them."
            fix += (
                " If the other loss should not train them, keep it away with detach() or "
                "requires_grad_(False)."
            )
        if loss.said is None or severity > loss.said:
            loss.said = severity
            self.report(
                9,
                severity,
                what,
                why=why,
                fix=fix,
                site=loss.erased_at,
                parameters=loss.bits,
                related=(loss.written_at,),
            )


def _picked_by_name(site: Site | None) -> bool:
    """`for name, p in model.named_parameters(): if "last" in name: p.grad = None`"""
    around = surroundings(site) if site is not None else ""  # the line itself comes first
    erases = re.search(r"\.grad(\s*=\s*None|(\.data)?\.zero_\()", around.partition("\n")[0])
    return bool(erases and "named_parameters(" in around and _BY_NAME.search(around))
