"""Calls of torch.distributions: who draws, how, and of what a density is asked."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch.distributions as distributions
from torch import Tensor

from gradient_doctor.guards import observed
from gradient_doctor.patches import Patches
from gradient_doctor.session import Session


class DistributionCalls:
    """Tells detectors of `sample`, `rsample`, `log_prob` and `entropy`: the outermost call only."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._inside = False  # a distribution made of distributions calls those in turn

    def install(self, patches: Patches) -> None:
        wanted = any(self.session.wants(name) for name in ("sampled", "density", "entropy"))
        for cls in _classes() if wanted else ():
            for name in ("sample", "rsample", "log_prob", "entropy"):
                if name in vars(cls):
                    observe = functools.partial(self._called, name)
                    patches.replace(cls, name, observed(self.session, self, observe, rests=True))

    def _called(self, name: str, distribution: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        session = self.session
        if self._inside or session.paused or not session.record.traced:
            return
        self._inside = True
        try:
            result = yield
        finally:
            self._inside = False
        if name == "log_prob":
            value = args[0] if args else kwargs.get("value")
            session.tell("density", distribution, value, result, session.here())
        elif name == "entropy":
            session.tell("entropy", distribution, result)
        else:
            session.draws += 1
            taint = session.taint_of(result) if isinstance(result, Tensor) else None
            if taint is not None and name == "rsample":
                taint.drawn = True  # detached, it is a sample like any other
            session.tell("sampled", distribution, result, name == "rsample", session.here())


def _classes() -> list[Any]:
    members = [getattr(distributions, name) for name in distributions.__all__]
    base = distributions.Distribution
    return [cls for cls in members if isinstance(cls, type) and issubclass(cls, base)]
