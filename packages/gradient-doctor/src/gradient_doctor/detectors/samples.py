"""Class 3: a draw that a decoder learns from, and that the encoder before it could pass on.

`Normal(mu, std).sample()` and `torch.normal(mu, std)` give numbers. In a variational autoencoder
the encoder still trains, by the divergence alone, and learns nothing of the reconstruction: the
latent code ends empty. So it is with weights that are drawn.

Said of draws that rsample could make, which go into layers of the same optimizer that the draw does
not depend on, or which make a term of the loss with data alone. Actions whose log-probability is
taken are meant, and so are draws that a network feeds back into itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import live_in
from gradient_doctor.findings import Severity, Site
from gradient_doctor.registry import owned_by
from gradient_doctor.session import Backward, Detector, OpCall, Session

_ENOUGH = 2  # steps


@dataclass(eq=False)
class Draw:
    """All draws of one line."""

    site: Site
    how: str
    before: int = 0  # the parameters that it depends on
    after: int = 0  # of the layers that took it
    added: bool = False
    used: bool = False  # with what it depends on: a log-probability, a loop
    steps: set[int] = field(default_factory=set)


class Samples(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._draws: dict[Site, Draw] = {}
        self._drawn = WeakIdKeyDictionary()  # a draw, or what is made of draws alone -> Draw

    def sampled(self, distribution: Any, value: Any, pathwise: bool, site: Site | None) -> None:
        if not pathwise and distribution.has_rsample and isinstance(value, Tensor):
            live = live_in(self.session, vars(distribution).values())
            self._draw(value, site, "sample", live)

    def density(self, distribution: Any, value: Any, result: Any, site: Site | None) -> None:
        draw = self._drawn.get(value) if isinstance(value, Tensor) else None
        if draw is not None:
            draw.used = True

    def _draw(self, value: Tensor, site: Site | None, how: str, live: int) -> None:
        if live and site is not None and value.is_floating_point():
            draw = self._draws.setdefault(site, Draw(site, how))
            draw.before |= live
            self._drawn[value] = draw

    def op(self, call: OpCall) -> None:
        if not call.outputs:
            return
        if call.name == "torch.normal":
            self._draw(
                call.outputs[0], call.site, "torch.normal", live_in(self.session, call.inputs)
            )
            return
        draws = [self._drawn[t] for t in call.inputs if t in self._drawn] if self._drawn else []
        if not draws:
            return
        live = live_in(self.session, [t for t in call.inputs if t not in self._drawn])
        for draw in draws:
            if live & draw.before and call.short == "add" and call.outputs[0].numel() == 1:
                draw.added = True  # a whole term of the loss is made of draws and data
            elif live & draw.before:
                draw.used = True
            elif any(isinstance(t, nn.Parameter) for t in call.inputs):
                draw.after |= live
        if not live and call.outputs[0].is_floating_point():
            for output in call.outputs:
                self._drawn[output] = draws[0]

    def backward_starts(self, backward: Backward) -> None:
        taint = backward.taint
        if taint is None or backward.kind != "backward":
            return
        cuts = {cut.site for cut in taint.cuts} | {c.region.site for c in taint.cuts if c.region}
        for draw in self._draws.values():
            apart = taint.live & draw.after and self._one_owner(draw)
            reached = taint.live & draw.before and (apart or draw.added)
            if reached and draw.site in cuts and not draw.used:
                draw.steps.add(backward.step)
                if len(draw.steps) == _ENOUGH:
                    self._say(draw)

    def _one_owner(self, draw: Draw) -> bool:
        """Whether one optimizer trains both sides: else they have losses of their own."""
        registry = self.session.registry
        held = (registry.bits(owned_by(o)) for o in registry.optimizers.values())
        return any(mask & draw.before and mask & draw.after for mask in held)

    def _say(self, draw: Draw) -> None:
        self.report(
            3,
            Severity.WARNING,
            f"`{draw.how}` cuts {self.session.registry.many(draw.before)} off from what is "
            "computed from the draw.",
            why="The draw is a number for autograd. What comes before it gets a gradient by other "
            "terms of the loss only: the layers behind the draw cannot tell it what they need.",
            fix="Use rsample(), or mu + std * torch.randn_like(std).",
            site=draw.site,
            parameters=draw.before,
        )
