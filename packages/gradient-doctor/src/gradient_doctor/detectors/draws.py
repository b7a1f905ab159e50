"""Class 3: a draw that should carry gradients, and does not: `sample()` where `rsample()` is meant.

An encoder whose latent is drawn by `sample()` trains by its divergence alone: the error of what is
decoded from the draw cannot reach it. Where the density of the draw is asked for, a score function
takes the gradient's place: that is a policy.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Backward, Detector, Session, StepRecord

_ENOUGH = 2  # steps


class Draws(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._drawn: dict[Site | None, int] = {}  # of this step: line -> parameters behind it
        self._densities = 0  # parameters behind distributions whose densities were asked for
        self._steps: dict[Site | None, set[int]] = {}

    def sampled(self, distribution: Any, value: Any, pathwise: bool, site: Site | None) -> None:
        if not isinstance(value, Tensor) or not getattr(distribution, "has_rsample", False):
            return
        if pathwise:
            self._densities |= self._behind(value)  # the pathwise draw is there as well
        else:
            self._note(value, site)

    def _behind(self, value: Tensor) -> int:
        taint = self.session.taint_of(value)
        return 0 if taint is None else taint.depends

    def _note(self, value: Tensor, site: Site | None) -> None:
        taint = self.session.taint_of(value)
        if taint is None or taint.live or value.requires_grad:
            return
        # gradients were on before the draw: a rollout under no_grad is meant
        hidden = 0
        for cut in taint.cuts:
            if cut.kind == "sample" or (cut.region is not None and cut.region.kind == "sample"):
                hidden |= cut.graph
        if hidden:
            self._drawn[site] = self._drawn.get(site, 0) | hidden

    def density(self, distribution: Any, value: Any, result: Any, site: Site | None) -> None:
        if isinstance(result, Tensor):
            self._densities |= self._behind(result)

    def step_ended(self, record: StepRecord) -> None:
        self._drawn.clear()
        self._densities = 0

    def backward_starts(self, backward: Backward) -> None:
        taint = backward.taint
        if taint is None or backward.kind != "backward":
            return
        for site, hidden in self._drawn.items():
            kept = hidden & taint.live  # they train, by another term of this loss
            if not kept or hidden & self._densities or not self._reaches(site, taint):
                continue
            steps = self._steps.setdefault(site, set())
            steps.add(backward.step)
            if len(steps) != _ENOUGH:
                continue
            self.report(
                3,
                Severity.WARNING,
                f"{self.session.registry.many(kept)} get no gradient through the draw that is "
                "made of them.",
                why="sample() gives numbers without gradient. What the loss computes from the draw "
                "cannot train the distribution that it is drawn from, which learns from the other "
                "terms alone; and no log-probability of the draw is asked for.",
                fix="Draw with rsample(), or mean + std * torch.randn_like(std).",
                site=site,
                parameters=kept,
                related=(backward.site,),
            )

    def _reaches(self, site: Site | None, taint: Any) -> bool:
        return any(
            cut.site == site or (cut.region is not None and cut.region.site == site)
            for cut in taint.cuts
        )
