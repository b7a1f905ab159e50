"""Training loops that lack a half: no optimizer (class 7), or no backward at all (class 21).

Gradients are computed for other ends, too: to look at them, to attack an input, to measure time.
So the loss must come from a loss function, its value must be read (a benchmark does not care), no
input may want a gradient, nobody may have looked at `.grad`, and no weight may have moved.

Losses are computed for other ends as well: an evaluation. So without a backward the model must be
in train() mode, gradients must be on, and an optimizer must be there, made in this run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradient_doctor.detectors.places import birth_site, count, most_common
from gradient_doctor.findings import Severity, Site
from gradient_doctor.readable import checksum, unreadable
from gradient_doctor.session import Backward, Detector, Event, OpCall, Session

_LOSSES = {
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "ctc_loss", "kl_div"),
}
_READS = {"item", "__float__", "tolist", "__format__", "detach"}
_ENOUGH = 8  # backwards


class Nobody(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._sums: dict[int, float] = {}  # by bit: at the first gradient
        self._sites: list[Site | None] = []  # of the backwards
        self._losses: dict[Site | None, int] = {}  # before any backward, by line
        self._trains = 0  # forwards in train() mode, the same
        self._scores = 0  # in eval() mode
        self._has_loss = self._is_read = self._other_ends = False
        self._moves = False  # an optimizer has stepped, or was given gradients

    def op(self, call: OpCall) -> None:
        if call.short in _LOSSES and call.outputs and call.outputs[0].requires_grad:
            self._has_loss = True
            if not self._sites:
                self._losses[call.site] = self._losses.get(call.site, 0) + 1
        elif call.short in _READS and call.inputs:
            value = call.inputs[0]
            self._is_read |= value.requires_grad and value.numel() == 1

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, site: Site | None) -> None:
        if torch.is_grad_enabled() and not self._sites:
            self._trains += module.training
            self._scores += not module.training

    def event(self, event: Event) -> None:
        self._moves |= event.kind in ("step", "grad_set")

    def backward_starts(self, backward: Backward) -> None:
        if len(self._sites) < _ENOUGH:
            self._sites.append(backward.site)

    def backward_ended(self, backward: Backward) -> None:
        session = self.session
        if session.registry.optimizers or self._other_ends:
            self._other_ends = True
            return
        if backward.kind != "backward" or backward.inputs is not None:
            self._other_ends = True
            return
        for tensor in session.registry.tensors(backward.received):
            if not isinstance(tensor, nn.Parameter) or unreadable(tensor) is not None:
                self._other_ends = True
                return
            bit = session.registry.bit(tensor)
            if bit not in self._sums:
                self._sums[bit] = checksum(tensor)

    def finish(self, error: BaseException | None) -> None:
        registry = self.session.registry
        if error is None and not self._sites:
            self._never_back()
            return
        parameters = list(registry.tensors(sum(self._sums)))
        if error is not None or self._other_ends or not self._has_loss or not self._is_read:
            return
        if registry.optimizers or registry.unnamed or len(self._sites) < _ENOUGH:
            return
        if sum(self._sums) & self.session.gradients_read or not parameters:
            return
        if any(p.grad is None for p in parameters):
            return  # somebody has cleared it: it was looked at, or a benchmark ends its round
        if any(checksum(p) != self._sums[registry.bit(p)] for p in parameters):
            return
        self.report(
            7,
            Severity.WARNING,
            f"{count(len(parameters), 'parameter')} with a gradient, and no optimizer at all.",
            why=f"{len(self._sites)} or more backwards computed gradients, which add up in .grad: "
            "no optimizer was made, nobody reads them, and no weight has moved.",
            fix="Make an optimizer of model.parameters() before the loop, and call its step() "
            "and zero_grad() after each backward.",
            site=most_common(self._sites),
            parameters=sum(self._sums),
        )

    def _never_back(self) -> None:
        registry = self.session.registry
        registry.flush()
        often = max(self._losses.values(), default=0)
        if often < _ENOUGH or self._trains < _ENOUGH or self._scores or self._moves:
            return
        if not registry.optimizers:
            return
        names = ", ".join(registry.optimizers)
        self.report(
            21,
            Severity.ERROR,
            f"{often} losses are computed, and backward is never called: nothing is trained.",
            why=f"The model is in train() mode, and {names} is there to step; but no loss that "
            "this line makes goes back. It may not come to the place where backward stands: not "
            "returned, or behind a condition that is never true.",
            fix="Follow the loss from here to its backward: return it, and look at the conditions.",
            site=max(self._losses, key=lambda site: self._losses[site]),
            parameters=registry.owned,
            related=tuple(birth_site(registry, o) for o in registry.optimizers.values()),
        )
