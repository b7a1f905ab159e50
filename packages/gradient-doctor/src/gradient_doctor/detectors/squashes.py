"""Class 24: the log-probability of a squashed action, and its correction.

An action a = tanh(u), with u drawn from a Gaussian, has the log-probability of u less the sum of
log(1 - a ** 2). Where a loss takes gradients through the action and through the log-probability of
u alone, the entropy is that of another variable. Where there is a logarithm, it is compared with
the slope of the squash as numbers: tanh may have been taken twice, or the logarithm been added.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import live_in
from gradient_doctor.findings import Severity, Site
from gradient_doctor.graph import MARK, node_of, nodes_of
from gradient_doctor.session import Backward, Detector, OpCall, Session, StepRecord

_ENOUGH = 2  # steps
_SAMPLES = 8
_APART = 0.1  # of the slope, at most places
_DENSITY = MARK + ".density"
_LOGARITHMS = {"log", "log1p", "softplus", "logsigmoid", "log_", "log2"}
_ELEMENTWISE = {
    *("tanh", "sigmoid", "pow", "square", "mul", "sub", "rsub", "__rsub__", "add", "neg", "clamp"),
    *("div", "exp", "__pow__", "view", "unsqueeze", "squeeze", "reshape", "clip", "cosh", "abs"),
}
_KEEPS = {"sum", "view", "reshape", "squeeze", "unsqueeze", "float"}


@dataclass(eq=False)
class Squash:
    """A draw: is it squashed, is its density taken, and which logarithms are made of it?"""

    site: Site | None
    pathwise: bool
    squashed: Site | None = None
    slope: Tensor | None = None  # of the squash, at this draw
    density: Site | None = None
    live: int = 0
    logarithms: list[tuple[Site | None, float | None]] = field(default_factory=list)


class Squashes(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._drawn = WeakIdKeyDictionary()
        self._derived = WeakIdKeyDictionary()  # functions of a draw alone -> Squash
        self._densities = WeakIdKeyDictionary()  # log-probabilities of draws -> Squash
        self._logarithms = WeakIdKeyDictionary()  # of the slope -> Squash
        self._squashes: list[Squash] = []  # of this step
        self._steps: dict[tuple[str, Site | None], set[int]] = {}

    def sampled(self, distribution: Any, value: Any, pathwise: bool, site: Site | None) -> None:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
            squash = Squash(site, pathwise and value.requires_grad)
            self._derived[value] = self._drawn[value] = squash
            self._squashes.append(squash)

    def density(self, distribution: Any, value: Any, result: Any, site: Site | None) -> None:
        if not isinstance(value, Tensor) or not isinstance(result, Tensor):
            return
        squash = self._drawn.get(value)  # of the draw itself, not of what it is squashed to
        live = live_in(self.session, [result])
        if squash is None or not live:
            return
        squash.density, squash.live = site, live
        self._densities[result] = squash
        node = node_of(result)
        if node is not None:
            cast(dict[str, Any], node.metadata)[_DENSITY] = squash

    def step_ended(self, record: StepRecord) -> None:
        self._squashes.clear()

    def op(self, call: OpCall) -> None:
        if not self._squashes or not call.outputs or not call.inputs:
            return
        source, result = call.inputs[0], call.outputs[0]
        squash = next((self._derived[t] for t in call.inputs if t in self._derived), None)
        if squash is not None:
            self._follow(call, squash)
        for known in (self._densities, self._logarithms):
            if source in known and call.short in _KEEPS:
                known[result] = known[source]
        if call.short in ("add", "add_", "__iadd__") and len(call.inputs) == 2:
            self._join(call)

    def _follow(self, call: OpCall, squash: Squash) -> None:
        source, result, short = call.inputs[0], call.outputs[0], call.short
        if short in _LOGARITHMS:
            apart = None
            if short == "log" and squash.slope is not None:
                apart = self._apart(source, squash.slope)
                if apart is not None and apart <= _APART:
                    self._logarithms[result] = squash
            squash.logarithms.append((call.site, apart))
        elif short in _ELEMENTWISE and all(t in self._derived or _is_scale(t) for t in call.inputs):
            if short in ("tanh", "sigmoid") and squash.slope is None:
                values = self.session.values(result)
                if values is not None:
                    a = values.detach()
                    squash.slope = 1 - a * a if short == "tanh" else a * (1 - a)
                    squash.squashed = call.site
            self._derived[result] = squash

    def _apart(self, taken: Tensor, slope: Tensor) -> float | None:
        """How far these values are from the slope, but for a constant factor."""
        values = self.session.values(taken)
        if values is None or values.shape != slope.shape:
            return None
        inside = slope > 1e-2
        if int(inside.sum()) < 8:
            return None
        ratio = torch.where(inside, values.detach() / slope, torch.nan)
        if ratio.dim() > 1 and ratio.shape[0] >= _SAMPLES:  # each action may have its own scale
            middle = ratio.nanmedian(0, keepdim=True).values
        else:
            middle = ratio.nanmedian()
        apart = (ratio - middle).abs() / middle.abs().clamp(min=1e-12)
        return float(apart[inside].mean())

    # verdicts

    def _join(self, call: OpCall) -> None:
        """log p(u) + log(1 - a ** 2): it should be subtracted."""
        density = next((self._densities[t] for t in call.inputs if t in self._densities), None)
        other = next((self._logarithms[t] for t in call.inputs if t in self._logarithms), None)
        if density is not None and density is other:
            self._say(
                "added",
                call.site,
                density,
                "The correction for the squashed action has the wrong sign.",
                f"log(1 - a ** 2) is added to the log-probability of the draw ({density.density}). "
                "Squashing crowds values together, so the density of the action is larger there.",
            )

    def backward_starts(self, backward: Backward) -> None:
        """Losses that use the density of a draw, and what the draw was squashed to."""
        squashed = [s for s in self._squashes if s.squashed and s.density]
        bare = [s for s in squashed if s.pathwise and not s.logarithms]
        odd = [s for s in squashed if len(s.logarithms) == 1 and (s.logarithms[0][1] or 0) > _APART]
        if not (bare or odd) or backward.taint is None or backward.kind != "backward":
            return
        for root in backward.roots:
            for node in nodes_of(node_of(root)):
                squash = node.metadata.get(_DENSITY)
                if squash in bare:
                    self._say(
                        "bare",
                        squash.density,
                        squash,
                        "The log-probability is that of the draw, and the action is what it is "
                        "squashed to.",
                        f"The draw goes through a squashing function at {squash.squashed}; a "
                        "gradient flows through the action and through this log-probability, from "
                        "which log|d squash / d draw| was never subtracted: the entropy that is "
                        "rewarded is that of values of any size, and the actions are driven to "
                        "the bounds.",
                    )
                elif squash in odd:
                    self._say(
                        "odd",
                        squash.logarithms[0][0],
                        squash,
                        "The correction for the squashed action is not the logarithm of the slope.",
                        f"The action is squashed at {squash.squashed}. Compared as numbers, what "
                        "this logarithm is taken of is no multiple of the slope there (1 - a ** 2 "
                        "for a = tanh(u)): it may be squashed twice, or taken at the draw.",
                    )

    def _say(self, kind: str, site: Site | None, squash: Squash, what: str, why: str) -> None:
        steps = self._steps.setdefault((kind, site), set())
        steps.add(self.session.step)
        if len(steps) != _ENOUGH:
            return
        self.report(
            24,
            Severity.WARNING,
            what,
            why=why,
            fix="log_prob - torch.log(1 - action.pow(2) + 1e-6), with action = tanh(draw), summed "
            "over the actions' axis.",
            site=site,
            parameters=squash.live,
            related=(squash.site, squash.squashed, squash.density),
        )


def _is_scale(tensor: Tensor) -> bool:
    """The bounds of the actions: a constant number, or one for each of them."""
    return not tensor.requires_grad and tensor.dim() <= 1
