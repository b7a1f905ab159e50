"""Class 19: masks that let nothing through."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import argument, live_in
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord

_CASTS = {"float", "long", "to", "int", "bool", "half", "double", "type_as", "bfloat16", "type"}
_MOVES = {
    *("__getitem__", "view", "reshape", "unsqueeze", "squeeze", "expand", "contiguous", "clone"),
    *("flatten", "expand_as", "stack", "cat", "detach", "transpose", "narrow", "repeat"),
}
_ONES = {"ones", "ones_like", "new_ones", "full", "full_like", "zeros", "zeros_like", "new_zeros"}
ID_LOSSES = ("cross_entropy", "nll_loss")


@dataclass
class Silenced:
    """A mask that let nothing of a live tensor through."""

    site: Site | None
    made: Site | None
    how: str
    live: int


@dataclass
class Dead:
    """What such a mask did to gradients, over the steps."""

    first: Silenced
    affected: int
    steps: set[int] = field(default_factory=set)
    whole: bool = False


class Masks(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.masks = WeakIdKeyDictionary()  # tensor of zeros and ones -> line that made it
        self.applied: dict[int, tuple[Site | None, Site | None]] = {}  # by size: mask, its use
        self._silenced: list[Silenced] = []
        self._dead: dict[Site | None, Dead] = {}
        self._steps: set[int] = set()  # traced steps with a backward
        self._alive = 0  # parameters that had a gradient in some step

    def op(self, call: OpCall) -> None:
        if not call.outputs:
            return
        self._follow(call)
        silenced = self._lets_nothing_through(call)
        if silenced is not None:
            self._silenced.append(silenced)

    def _follow(self, call: OpCall) -> None:
        """Where was this mask made? Casts and slices of it are the same mask."""
        result = call.outputs[0]
        source = next((t for t in call.inputs if t in self.masks), None)
        if call.short in _CASTS | _MOVES:
            if source is not None:
                self.masks[result] = self.masks[source]
        elif result.dtype is torch.bool or call.short in _ONES:
            self.masks[result] = call.site

    def _lets_nothing_through(self, call: OpCall) -> Silenced | None:
        mask, value, how = self._masked(call)
        if mask is None or value is None or not value.numel():
            return None
        live = live_in(self.session, [value])
        if not live:
            return None
        self.applied[mask.numel()] = (self.masks.get(mask), call.site)
        if call.short == "masked_fill":
            empty = bool(mask.all())
        elif call.short in ID_LOSSES:
            empty = bool((mask == argument(call, 4, "ignore_index", -100)).all())
        else:
            empty = mask.numel() > 0 and not bool(mask.any())
        return Silenced(call.site, self.masks.get(mask), how, live) if empty else None

    def _masked(self, call: OpCall) -> tuple[Tensor | None, Tensor | None, str]:
        """The mask of this call and the value that it chooses from."""
        args = [a for a in (*call.args, *call.kwargs.values()) if isinstance(a, Tensor)]
        if call.short == "where" and len(call.args) == 3:
            mask, value = call.args[:2]
            if isinstance(mask, Tensor) and isinstance(value, Tensor) and mask.dtype is torch.bool:
                return mask, value, "chooses the other branch everywhere"
        elif call.short in ("masked_fill", "masked_fill_", "masked_select") and len(args) >= 2:
            return args[1], args[0], "fills every position" if "fill" in call.short else "is empty"
        elif call.short == "__getitem__" and len(args) == 2 and args[1].dtype is torch.bool:
            return args[1], args[0], "selects nothing"
        elif call.short in ("mul", "multiply") and len(args) == 2:
            for value, mask in (args, args[::-1]):
                if mask in self.masks and not mask.requires_grad and value.requires_grad:
                    return mask, value, "is 0 everywhere"
        elif call.short in ID_LOSSES and len(args) >= 2 and not args[1].is_floating_point():
            return args[1], args[0], "ignores every target"
        return None, None, ""

    # backward

    def backward_ended(self, backward: Backward) -> None:
        if backward.taint is None or not self.session.record.traced:
            return
        self._steps.add(backward.step)
        silenced, self._silenced = self._silenced, []
        losses = map(self.session.values, backward.roots)
        broken = any(values is not None and not bool(values.isfinite().all()) for values in losses)
        alive = 0
        for bit, fact in backward.gradients.items():
            if fact.finite and not fact.zero:
                alive |= bit
        self._alive |= alive
        for mask in silenced:
            affected = mask.live & backward.taint.live & ~alive
            if affected:
                self._bury(mask, affected, backward.step, not alive)
        if broken:
            self._report_dead(broken=True)

    def _bury(self, mask: Silenced, affected: int, step: int, whole: bool) -> None:
        dead = self._dead.setdefault(mask.site, Dead(mask, affected))
        dead.steps.add(step)
        dead.affected |= affected
        dead.whole |= whole

    def step_ended(self, record: StepRecord) -> None:
        self.applied.clear()
        self._silenced.clear()
        if record.traced and self.session.age + 1 >= self.session.trace_steps:
            self._report_dead()

    def finish(self, error: BaseException | None) -> None:
        self._report_dead()

    def _report_dead(self, broken: bool = False) -> None:
        """A mask that was empty once may be bad luck; in every step it is a mistake."""
        for dead in self._dead.values():
            always = dead.steps == self._steps
            every = always and len(self._steps) > 1
            affected = dead.affected & ~self._alive if every else dead.affected
            if not affected or not (dead.whole or always):
                continue
            if every or broken:
                severity = Severity.ERROR
                if self.session.ledger is not None:
                    self.session.ledger.explained |= affected
            else:
                often = 2 * len(dead.steps) >= len(self._steps) > 1
                severity = Severity.WARNING if dead.whole and often else Severity.NOTE
            first = dead.first
            when = "in every step" if every else f"in step {min(dead.steps)}"
            self.report(
                19,
                severity,
                f"A mask {first.how} {when}: nothing of what it masks reaches the loss.",
                why="The mask"
                + (f" made at {first.made}" if first.made is not None else "")
                + " lets no position through, so the loss is empty (0 or not a number).",
                fix="Check how the mask is made (lengths, shift, comparison); skip batches without "
                "any position explicitly.",
                site=first.made or first.site,
                parameters=affected,
                related=(first.site,),
            )
        self._dead.clear()
