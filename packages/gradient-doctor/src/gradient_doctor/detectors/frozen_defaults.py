"""Class 4: a network that its own constructor freezes by default, before anything is loaded.

`def __init__(self, freeze=True)` is made for weights that come from somewhere. Here the caller says
nothing of it, the weights are still the random ones, the loss passes through them, and the
optimizer was given them to train. Random features that are frozen without being asked, or because
the caller asks for it, are meant.
"""

from __future__ import annotations

import ast

from torch import Tensor

from gradient_doctor.detectors.places import count
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Backward, Detector, Session
from gradient_doctor.slips import calls_in, default_behind

_STEPS = 3
_NETWORK = 2  # weight matrices: one alone may be a projection


class FrozenDefaults(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._depends = self._live = 0
        self._steps: set[int] = set()

    def backward_ended(self, backward: Backward) -> None:
        if backward.taint is not None and backward.kind == "backward":
            self._depends |= backward.taint.depends
            self._live |= backward.taint.live
            self._steps.add(backward.step)

    def finish(self, error: BaseException | None) -> None:
        registry = self.session.registry
        owned = registry.owned
        if error is not None or len(self._steps) < _STEPS or not self._live & owned:
            return
        groups: dict[tuple[str, Site], list[Tensor]] = {}
        for parameter in registry.tensors(self._depends & owned & ~self._live):
            callers: tuple[Site, ...] = registry.freezers.get(parameter) or ()
            if parameter.requires_grad or parameter.dim() < 2 or not registry.is_random(parameter):
                continue
            choice = default_behind(callers[0]) if callers else None
            site = None if choice is None else _left_to_default(*choice, callers[1:])
            if choice is not None and site is not None:
                groups.setdefault((choice[0], site), []).append(parameter)
        for (name, site), parameters in groups.items():
            if len(parameters) >= _NETWORK:
                self._say(name, site, parameters)

    def _say(self, name: str, site: Site, parameters: list[Tensor]) -> None:
        registry = self.session.registry
        off = registry.frozen_at.get(parameters[0])
        self.report(
            4,
            Severity.WARNING,
            f"{count(len(parameters), 'weight')} that the optimizer holds "
            "were frozen at random values by a default.",
            why=f"`{name}` is not given here, and its default switches requires_grad off at {off}. "
            "Nothing was loaded into these weights: the loss passes through a random network that "
            "never learns.",
            fix=f"Pass `{name}` so that they train; or load weights, and keep them out of the "
            "optimizer.",
            site=site,
            parameters=registry.bits(parameters),
            related=(off,),
        )


def _left_to_default(name: str, place: int, callers: tuple[Site, ...]) -> Site | None:
    """The call that could have given the argument, and gave nothing; `place` is its position."""
    for site in callers:
        calls = [call for call in calls_in(site.file) if _covers(call, site.line)]
        words = {word.arg for call in calls for word in call.keywords}
        plain = [a for call in calls for a in call.args if not isinstance(a, ast.Starred)]
        if name in words or any(len(call.args) > place for call in calls):
            return None
        if calls and None not in words and len(plain) == sum(len(call.args) for call in calls):
            return site
    return None


def _covers(call: ast.Call, line: int) -> bool:
    return call.lineno <= line <= (call.end_lineno or call.lineno)
