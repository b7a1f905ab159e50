"""Class 4: a random layer that is frozen, with everything that trains before it.

Freezing keeps what a layer has learnt, so the first layers of a trained model are frozen, and the
last ones train. A layer of random numbers that the program has switched off, and that all trained
layers have to pass on their way to the loss, is the other way round: a flag that is inverted, a
freeze that took the new head. Adapters and prompts train inside of, beside or before frozen layers:
where a layer also rests there, or a trained parameter is called so, nothing is said.
"""

from __future__ import annotations

import re

from torch import Tensor, nn

from gradient_doctor.detectors.common import live_in
from gradient_doctor.detectors.places import by_site, count
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Backward, Detector, OpCall, Session
from gradient_doctor.sites import is_user_file

_WITHIN = re.compile(r"adapt|lora|prompt|prefix|bitfit|ia3|delta|hyper", re.IGNORECASE)
_STEPS = 3


class FrozenLayers(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._before: dict[int, int] = {}  # by bit of a frozen weight: what trains before it
        self._depends = 0  # what some loss depends on
        self._live = 0
        self._steps: set[int] = set()

    def op(self, call: OpCall) -> None:
        if call.short in ("uniform_", "normal_") and isinstance(call.inputs[0], nn.Parameter):
            self.session.registry.initialised(call.inputs[0])
        for tensor in call.inputs:
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad and tensor.dim() > 1:
                bit = self.session.registry.bit(tensor)
                live = live_in(self.session, [t for t in call.inputs if t is not tensor])
                self._before[bit] = self._before.get(bit, 0) | live

    def backward_ended(self, backward: Backward) -> None:
        if backward.taint is not None:
            self._depends |= backward.taint.depends
            self._live |= backward.taint.live
            self._steps.add(backward.step)

    def finish(self, error: BaseException | None) -> None:
        registry = self.session.registry
        trained = self._live & registry.owned
        if error is not None or len(self._steps) < _STEPS or not trained:
            return
        layers = list(registry.tensors(trained))
        if not all(self._is_whole_layer(p, trains=True) for p in layers):
            return
        roots = {registry.name(p).split(".")[0] for p in layers}
        resting = [
            p
            for p in registry.tensors(sum(self._before) & self._depends)
            if not p.requires_grad and {registry.name(p).split(".")[0]} == roots
        ]
        if any(trained & ~self._before[registry.bit(p)] for p in resting):
            return  # some rest beside or before what trains: that is how adapters are put in
        frozen = [
            p
            for p in resting
            if registry.is_random(p)
            and self._is_whole_layer(p, trains=False)
            and self._frozen_by_user(p)
        ]
        for site, mask in by_site(registry, frozen, self._frozen_at).items():
            self._say(site, mask, trained)

    def _is_whole_layer(self, parameter: Tensor, trains: bool) -> bool:
        """Whether it belongs to a layer of torch's all of which trains, or rests."""
        registry = self.session.registry
        home = registry.home(parameter)
        if home is None or next(home.children(), None) is not None:
            return False
        if not type(home).__module__.startswith("torch.nn."):
            return False
        if _WITHIN.search(registry.name(parameter)) or not registry.is_registered(parameter):
            return False
        return all(p.requires_grad == trains for p in home.parameters())

    def _frozen_at(self, parameter: Tensor) -> Site | None:
        return self.session.registry.frozen_at.get(parameter)

    def _frozen_by_user(self, parameter: Tensor) -> bool:
        site = self._frozen_at(parameter)
        return site is not None and is_user_file(site.file)

    def _say(self, site: Site | None, mask: int, trained: int) -> None:
        names = self.session.registry.names(trained)
        self.report(
            4,
            Severity.WARNING,
            f"{count(mask.bit_count(), 'weight')} between the trained layers and the loss "
            f"{'is' if mask.bit_count() == 1 else 'are'} frozen at random values.",
            why="They were made in this run, nothing was loaded into them and no step has moved "
            f"them; requires_grad is switched off here. What trains ({names[0]} and the like) "
            "comes before them: its output passes through random layers that never learn.",
            fix="Turn the condition round if it is inverted, or unfreeze the last layers; load "
            "weights before freezing if they should stay.",
            site=site,
            parameters=mask,
        )
