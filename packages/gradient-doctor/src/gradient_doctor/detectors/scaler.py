"""Class 17: the order of a gradient scaler's calls.

The right order: scale(loss).backward() for every loss, unscale_, clip, step for each optimizer,
then update once. The state is kept per parameter (is its gradient scaled?) and per optimizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch

from gradient_doctor.findings import Severity, Site
from gradient_doctor.graph import MARK, node_of, nodes_of
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session
from gradient_doctor.taint import tensors_in

_LOW = {torch.float16, torch.bfloat16}
_SCALED = MARK + ".scaled"
_ORDER = (
    "The order is: scaler.scale(loss).backward(); scaler.unscale_(optimizer); "
    "clip_grad_norm_(...); scaler.step(optimizer); scaler.update()."
)


_WRITES = {"mul_", "div_", "clamp_", "clip_", "clamp_min_", "clamp_max_", "__imul__"}


@dataclass
class Stage:
    """One optimizer since the last update of the scaler."""

    unscaled_at: Site | None = None
    unscaled: bool = False
    stepped_at: Site | None = None
    stepped: bool = False
    backward_since: bool = False  # after that step
    updated_early: Site | None = None  # update() after unscale_ and before step


class Scaler(Detector):
    """A state machine over the calls of the scaler, of backward, of clipping and of step."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._stages: dict[int, Stage] = {}
        self._scaled = 0  # parameters whose gradient is multiplied by the scale
        self._plain: dict[Site | None, int] = {}  # backward line -> gradients that are not
        self._late: dict[int, Site | None] = {}  # optimizer -> a scaled backward after unscale_
        self._spent = 0  # parameters that have been stepped with their present gradient
        self._root_scaled = False
        self._inside = 0  # within scaler.step
        self._scaler: Any = None
        self._first: Site | None = None  # where a loss was scaled first
        self._factors: dict[
            Site | None, set[float]
        ] = {}  # that scaled gradients were multiplied by
        self._low: set[torch.dtype] = set()  # precisions below fp32 that something ran in
        self._traced = 0

    def _stage(self, optimizer: Any) -> Stage:
        return self._stages.setdefault(id(optimizer), Stage())

    def _owned(self, optimizer: Any) -> int:
        return self.session.registry.bits(owned_by(optimizer))

    @property
    def _factor(self) -> str:
        return "" if self._scaler is None else f"{self._scaler.get_scale():g}"

    # facts

    def op(self, call: OpCall) -> None:
        if call.short in _WRITES and self._scaled and not self._inside:
            self._written(call)
        if torch.float16 in self._low:
            return
        self._low.update(t.dtype for t in call.outputs if t.dtype in _LOW)
        device = call.outputs[0].device.type if call.outputs else "meta"
        if device != "meta" and torch.is_autocast_enabled(device):
            self._low |= {torch.get_autocast_dtype(device)} & _LOW

    def _written(self, call: OpCall) -> None:
        """A scaled gradient that the program clips itself: by a factor that is its own result."""
        target = call.inputs[0] if call.inputs else None
        if target is None or target.requires_grad:
            return
        held = [p for p in self.session.registry.tensors(self._scaled) if p.grad is target]
        if not held:
            return
        factors = self._factors.setdefault(call.site, set())
        if call.short.startswith(("clamp", "clip")):
            factors |= {0.0, 1.0}  # not by the same factor for all
        else:
            number = call.args[1] if len(call.args) > 1 else None
            factor = float(number) if number is not None and _is_number(number) else 1.0
            scale = self._scaler.get_scale() if self._scaler is not None else 1.0
            if math.isclose(factor, scale) or math.isclose(factor * scale, 1.0):
                return  # unscaled by hand
            factors.add(factor)
        if len(factors) > 1:
            self._say(
                Severity.ERROR,
                "Gradients are clipped by hand while they are still scaled.",
                f"They are {self._factor} times too large, so the norm that this factor comes "
                "from, or the bound, means something else than it says.",
                call.site,
                self.session.registry.bits(held),
            )

    def event_ended(self, event: Event) -> None:
        if event.kind == "scale" and event.data["scaler"].is_enabled():
            for tensor in tensors_in(event.data["result"]):
                node = node_of(tensor)
                if node is not None:
                    cast(dict[str, Any], node.metadata)[_SCALED] = True
        elif event.kind == "scaler_step":
            self._inside = max(0, self._inside - 1)
            if event.data["args"] and event.data["scaler"].is_enabled():
                optimizer = event.data["args"][0]
                stage = self._stage(optimizer)
                stage.stepped, stage.stepped_at, stage.backward_since = True, event.site, False
                self._leave(self._owned(optimizer))

    def backward_starts(self, backward: Backward) -> None:
        # looked up now: the graph may be gone afterwards
        self._root_scaled = (
            self._scaler is not None
            and self.session.record.checked
            and any(
                _SCALED in node.metadata
                for root in backward.roots
                for node in nodes_of(node_of(root))
            )
        )

    def backward_ended(self, backward: Backward) -> None:
        if backward.kind != "backward":
            return
        if not self.session.record.checked:
            # who received what is not known in this step
            self._spent = self._scaled = 0
            self._plain.clear()
            for stage in self._stages.values():
                stage.backward_since, stage.updated_early = True, None
            return
        self._traced += self.session.record.traced
        dtypes = {fact.dtype for fact in backward.gradients.values()}
        self._low |= dtypes & _LOW
        received = backward.received
        self._spent &= ~received
        if self._root_scaled:
            self._scaled |= received
        else:
            self._plain[backward.site] = self._plain.get(backward.site, 0) | received
        for optimizer in self.session.registry.optimizers.values():
            stage = self._stages.get(id(optimizer))
            if stage is not None and received & self._owned(optimizer):
                stage.backward_since = True
                stage.updated_early = None
                if stage.unscaled and self._root_scaled:
                    self._late[id(optimizer)] = backward.site

    def _leave(self, bits: int) -> None:
        """Their gradients have been used, or are gone."""
        self._scaled &= ~bits
        self._plain = {site: mask & ~bits for site, mask in self._plain.items() if mask & ~bits}

    # calls

    def event(self, event: Event) -> None:
        if event.kind in ("zero_grad", "clip", "step_starts", "step"):
            if self.session.record.checked:
                self._others(event)
        elif event.kind in ("scale", "unscale", "scaler_step", "scaler_update"):
            if not event.data["scaler"].is_enabled():
                self._inside += event.kind == "scaler_step"
                return
            self._scaler = event.data["scaler"]
            if event.kind == "scale":
                self._first = self._first or event.site
            elif event.kind == "unscale":
                self._unscale(event)
            elif event.kind == "scaler_step":
                self._step(event)
                self._inside += 1
            elif event.kind == "scaler_update":
                self._update(event)

    def _others(self, event: Event) -> None:
        if event.kind == "zero_grad":
            bits = self.session.registry.bits(event.data["parameters"])
            self._leave(bits)
            self._spent &= ~bits
        elif event.kind == "clip":
            self._clip(event)
        elif event.kind == "step_starts":
            self._direct_step(event)
        elif event.kind == "step":
            self._spent |= self._owned(event.data["optimizer"])
            self._leave(self._owned(event.data["optimizer"]))

    def _unscale(self, event: Event) -> None:
        if not event.data["args"]:
            return
        optimizer = event.data["args"][0]
        stage = self._stage(optimizer)
        self._unscaled_loss(optimizer, event)
        if stage.unscaled or stage.stepped:
            return  # refused by torch: see event_failed
        stage.unscaled, stage.unscaled_at = True, event.site
        self._scaled &= ~self._owned(optimizer)

    def _step(self, event: Event) -> None:
        if not event.data["args"]:
            return
        optimizer = event.data["args"][0]
        stage = self._stage(optimizer)
        owned = self._owned(optimizer)
        if stage.updated_early is not None:
            self._say(
                Severity.ERROR,
                "scaler.update() is called between unscale_ and step.",
                f"update() forgets that the gradients were unscaled, so the step at {event.site} "
                f"divides them by the scale of {self._factor} a second time.",
                stage.updated_early,
                owned,
                (event.site,),
            )
            stage.updated_early = None
        if not stage.unscaled:
            self._unscaled_loss(optimizer, event)
        elif self._scaled & owned:
            self._say(
                Severity.ERROR,
                "unscale_ is called before the last backward of the step.",
                f"The backward at {self._late.get(id(optimizer))} adds gradients that are "
                f"{self._factor} times too large to gradients that are already unscaled.",
                stage.unscaled_at,
                self._scaled & owned,
                (self._late.get(id(optimizer)), event.site),
            )

    def _unscaled_loss(self, optimizer: Any, event: Event) -> None:
        """Gradients of a loss that never met the scaler, about to be divided by its scale."""
        owned = self._owned(optimizer)
        stage = self._stage(optimizer)
        # without any scale torch refuses the call, and event_failed comes here
        refused = "error" in event.data
        if stage.unscaled or stage.stepped or (not refused and self._scaler._scale is None):
            return
        for site, mask in self._plain.items():
            if mask & owned:
                self._say(
                    Severity.ERROR,
                    "The loss of this backward is not scaled, but its gradients will be unscaled.",
                    f"The call at {event.site} divides them by the scale"
                    f" of {self._factor}: the step is too small by that factor.",
                    site,
                    mask & owned,
                    (event.site,),
                )

    def _update(self, event: Event) -> None:
        for stage in self._stages.values():
            early = stage.unscaled and not stage.stepped
            stage.updated_early = event.site if early else None
            stage.unscaled = stage.stepped = False
        self._late.clear()

    def _clip(self, event: Event) -> None:
        limit = float(event.data["max_norm"])
        if math.isinf(limit):
            return  # only measures
        parameters = [p for p in event.data["parameters"] if p.grad is not None]
        bits = self.session.registry.bits(parameters)
        # without an optimizer nobody could unscale them: that is class 7
        scaled = bits & self._scaled & self.session.registry.owned
        norm = event.data["total_norm"]
        measured = "" if norm is None else f" The norm it measured is {float(norm):.3g}."
        if scaled:
            self._say(
                Severity.ERROR,
                "Gradients are clipped while they are still scaled.",
                f"They are {self._factor} times too large, so a limit of {limit:g} acts like "
                f"{limit / (self._scaler.get_scale() or 1.0):.2g}.{measured}",
                event.site,
                scaled,
            )
        elif bits and not bits & ~self._spent:
            self._say(
                Severity.WARNING,
                "Gradients are clipped after the optimizer has stepped.",
                f"The step has used them unclipped; this call changes nothing.{measured}",
                event.site,
                bits,
            )

    def _direct_step(self, event: Event) -> None:
        if self._inside or self._scaler is None:
            return
        optimizer = event.data["optimizer"]
        owned = self._owned(optimizer)
        stage = self._stage(optimizer)
        if owned & self._scaled:
            self._say(
                Severity.ERROR,
                "The optimizer steps directly, with gradients that are still scaled.",
                f"They are {self._factor} times too large, and nothing checks them for overflow.",
                event.site,
                owned & self._scaled,
            )
        elif stage.unscaled:
            self._say(
                Severity.WARNING,
                "The optimizer steps directly, past the scaler's check for overflow.",
                "After unscale_ the gradients have the right size, but a step with infinite "
                "gradients is skipped by scaler.step(optimizer) only.",
                event.site,
                owned,
            )

    def event_failed(self, event: Event, error: BaseException) -> None:
        if event.kind == "scaler_step":
            self._inside = max(0, self._inside - 1)
        text, site = str(error), event.site
        called = event.kind in ("unscale", "scaler_step") and event.data["args"]
        optimizer = event.data["args"][0] if called else None
        stage = Stage() if optimizer is None else self._stage(optimizer)
        bits = 0 if optimizer is None else self._owned(optimizer)
        if "already been called on this optimizer" in text:
            what = "unscale_ is called twice for the same step."
            why = f"It was called at {stage.unscaled_at} before, and no update() in between."
            related = (stage.unscaled_at,)
        elif "called after step" in text or "called since the last update" in text:
            what = f"`{_name(event)}` is called after step, without an update() in between."
            why = f"The scaler stepped this optimizer at {stage.stepped_at}."
            related = (stage.stepped_at,)
            if stage.backward_since:  # a new step has begun: the old one was not closed
                what = "scaler.update() is missing after this step."
                why = f"The next step's `{_name(event)}` at {event.site} is refused."
                site, related = stage.stepped_at, (event.site,)
        elif "No inf checks were recorded" in text:
            if event.kind == "scaler_update":
                what = "scaler.update() is called before any step or unscale_."
                why = "There is no gradient check yet that it could set the scale by."
            else:
                what = "The scaler steps an optimizer that has no gradients."
                why = "No parameter of it has a gradient: backward has not run, or not for these."
            related = ()
        elif "is None" in text and "Attempted" in text:
            count = len(self.session.findings)
            if optimizer is not None:
                self._unscaled_loss(optimizer, event)
            if len(self.session.findings) > count:
                return
            what = f"`{_name(event)}` is called before any loss was scaled."
            why = "scaler.scale(loss) has not been called: the scaler has no scale yet."
            related = ()
        else:
            return
        self._say(Severity.ERROR, what, why, site, bits, related)

    def finish(self, error: BaseException | None) -> None:
        if error is not None or self._first is None or not self._traced or self.session.compiled:
            return  # what torch.compile runs, and how, is not seen
        self._low |= {p.dtype for p in self.session.registry.everything()} & _LOW
        if torch.float16 in self._low:
            return
        plain = not self._low
        self.report(
            17,
            Severity.NOTE,  # a cost, not a fault: the weights are those of a run without it
            "The gradient scaler is of no use here.",
            why=(
                "Everything ran in float32: no parameter, operation or gradient of the traced steps"
                " was in half precision, and no autocast was on. Only in float16 do small "
                "gradients vanish; here the scaler costs a check of all gradients per step, and "
                "skips steps for nothing while it looks for its scale."
                if plain
                else "No operation of the traced steps computed in float16, and bfloat16 has the "
                "range of float32; only in float16 do small gradients vanish."
            ),
            fix="Remove it (or enabled=False), or run the forward under "
            "torch.autocast(dtype=torch.float16) if mixed precision is meant.",
            site=self._first,
        )

    def _say(
        self,
        severity: Severity,
        what: str,
        why: str,
        site: Site | None,
        bits: int,
        related: tuple[Site | None, ...] = (),
    ) -> None:
        self.report(
            17, severity, what, why=why, fix=_ORDER, site=site, parameters=bits, related=related
        )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float))


def _name(event: Event) -> str:
    return {"unscale": "unscale_", "scaler_step": "step", "scaler_update": "update"}[event.kind]
