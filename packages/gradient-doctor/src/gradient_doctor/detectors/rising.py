"""Class 32, seen from outside: a loss that rises step after step along its own gradient.

A wrong sign cannot be told from a learning rate that is too large, nor from an adversary that gets
better. So what was seen is said, and where the weights were moved. Where the program moves them by
hand, and nothing else trains, it is a warning; under optimizers, whose losses may be at odds with
each other, a note.
"""

from __future__ import annotations

import itertools
import math

from gradient_doctor.findings import Severity, Site
from gradient_doctor.graph import is_dead_view, node_of
from gradient_doctor.session import Backward, Detector, OpCall, Session

_STEPS = 10
_RISES = 9  # of them
_GROWTH = 1.2  # of the loss over all of them
_STEEP, _STEEP_RISES = 5.0, 7  # a loss of changing data falls now and then on its way up


class Rising(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._losses: dict[Site | None, list[float]] = {}
        self._moved: Site | None = None  # the line that writes to a leaf that has a gradient

    def op(self, call: OpCall) -> None:
        for target in call.targets[:1]:
            leaf = target.requires_grad and node_of(target) is None and not is_dead_view(target)
            if leaf and target.grad is not None and call.short not in ("zero_", "fill_"):
                self._moved = call.site

    def backward_starts(self, backward: Backward) -> None:
        losses = self._losses.setdefault(backward.site, [])
        root = backward.roots[0] if backward.kind == "backward" and backward.roots else None
        if root is None or root.numel() != 1 or root.device.type != "cpu" or len(losses) > _STEPS:
            return
        values = self.session.values(root)
        loss = math.nan if values is None or values.is_complex() else float(values)
        losses.append(loss)
        if len(losses) == _STEPS + 1 and math.isfinite(loss):
            self._judge(backward, losses)

    def _judge(self, backward: Backward, losses: list[float]) -> None:
        rises = sum(after > before for before, after in itertools.pairwise(losses))
        grown = losses[-1] > losses[0] + (_GROWTH - 1) * abs(losses[0])
        registry = self.session.registry
        steep = rises >= _STEEP_RISES and losses[-1] > _STEEP * losses[0] > 0
        if not ((rises >= _RISES and grown) or steep) or len(self._losses) > 1:
            return
        by_hand = not registry.optimizers and not registry.unnamed and self._moved is not None
        self.report(
            32,
            Severity.WARNING if by_hand else Severity.NOTE,
            f"The loss rose in {rises} of {_STEPS} steps along its own gradient, from "
            f"{losses[0]:.3g} to {losses[-1]:.3g}.",
            why="Steps against the gradient lower a loss, if they are small. These go along it, or "
            "they are too large.",
            fix="Subtract the gradient; if it is subtracted, lower the learning rate.",
            site=self._moved if by_hand else backward.site,
            related=(backward.site,),
        )
