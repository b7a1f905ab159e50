"""Class 24: a log-probability that is not the sampler's, a score function with a live action."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributions as distributions
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradient_doctor.detectors.common import live_in, shape
from gradient_doctor.findings import Severity, Site
from gradient_doctor.session import Detector, OpCall, Session

_SQUASH = {"tanh", "sigmoid", "clamp", "clip", "hardtanh", "softsign", "relu", "softplus", "exp"}
_INVERSE = {"atanh", "arctanh", "logit", "log"}
_SAME = {
    *("detach", "clone", "float", "to", "double", "__getitem__", "view", "reshape", "unsqueeze"),
    *("squeeze", "stack", "cat", "index_select", "gather", "flatten", "contiguous", "transpose"),
    *("narrow", "expand", "repeat_interleave", "cpu", "cuda", "data"),
}
_COMBINES = {"add", "sub", "__rsub__", "mul", "neg", "div"}
_SUMS = {"add", "sub", "__rsub__"}
_SCALE = {"mul", "div", "mul_", "div_"}
_TERMS = {
    "sum",
    "neg",
    "add",
    "sub",
    "mean",
    "squeeze",
    "unsqueeze",
    "view",
    "reshape",
    "float",
    "exp",
}


@dataclass(frozen=True)
class Sample:
    """A tensor that was drawn, or made from a draw by one known function."""

    site: Site | None
    family: type
    squashed: str = ""  # the function between the draw and this tensor
    squashed_at: Site | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Score:
    """A log-probability of an action through which gradients reach the action's distribution."""

    action: Site | None
    density: Site | None
    depends: int


class Estimators(Detector):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._samples = WeakIdKeyDictionary()
        self._scores = WeakIdKeyDictionary()
        # a log-probability for each component of an action -> where it was taken
        self._componentwise = WeakIdKeyDictionary()
        self._spread: dict[Site | None, set[int]] = {}

    def sampled(self, distribution: Any, value: Any, pathwise: bool, site: Site | None) -> None:
        if isinstance(value, Tensor):
            self._samples[value] = Sample(site, _family(distribution))

    def density(self, distribution: Any, value: Any, result: Any, site: Site | None) -> None:
        if not isinstance(value, Tensor) or not isinstance(result, Tensor):
            return
        sample = self._samples.get(value)
        several = result.dim() > 1 and result.shape[-1] > 1
        if sample is not None and several and value.shape == result.shape:
            self._componentwise[result] = site
        live = live_in(self.session, [result])
        if sample is not None and sample.family is _family(distribution):
            how = sample.squashed or (abs(sample.scale - 1) > 1e-6 and "scaling") or ""
            if how and live:
                self._wrong_place(sample, how, live, site)
                return
        taint = self.session.taint_of(value)
        if live and value.requires_grad and taint is not None and taint.live & live:
            origin = sample.site if sample is not None else taint.site
            self._scores[result] = Score(origin, site, taint.depends | live)

    def _wrong_place(self, sample: Sample, how: str, live: int, site: Site | None) -> None:
        family = sample.family.__name__
        self.report(
            24,
            Severity.ERROR,
            f"The log-probability is taken at {how}(sample), but {family} drew the sample itself.",
            why=f"{family}.log_prob is the density of the value before {how}; at the changed value "
            "it is another number, and the gradient's mean is not that of the expected reward.",
            fix="Keep the raw sample and call log_prob on it; for the density of the squashed "
            "action subtract log|d squash / d raw|, or use TransformedDistribution.",
            site=site,
            parameters=live,
            related=(sample.site, sample.squashed_at),
        )

    # what becomes of samples and of log-probabilities

    def op(self, call: OpCall) -> None:
        if not call.outputs or not call.inputs:
            return
        self._follow_components(call)
        sample = self._samples.get(call.inputs[0])
        if sample is not None:
            self._follow_sample(call, sample)
        if any(t in self._scores for t in call.inputs):
            self._follow_score(call)

    def _follow_components(self, call: OpCall) -> None:
        """log_prob of each component [N, k], where a sum over them [N, 1] is meant."""
        known = [t for t in call.inputs if t in self._componentwise]
        if not known or call.short not in _COMBINES:
            return
        whole, result = known[0], call.outputs[0]
        others = [t for t in call.inputs if t is not whole]
        if result.shape == whole.shape and all(t.shape in (whole.shape, ()) for t in others):
            self._componentwise[result] = self._componentwise[whole]
            return
        column = (*whole.shape[:-1], 1)
        if call.short not in _SUMS or len(others) != 1 or tuple(others[0].shape) != column:
            return
        if others[0].numel() < 2 or not live_in(self.session, [whole, others[0]]):
            taint = self.session.taint_of(others[0])
            if others[0].numel() < 2 or taint is None or not taint.depends:
                return
        steps = self._spread.setdefault(call.site, set())
        steps.add(self.session.step)
        if len(steps) == 2:
            self.report(
                18,
                Severity.WARNING,
                f"{call.short} broadcasts a value {shape(others[0])} over the "
                f"{whole.shape[-1]} components of a log-probability {shape(whole)}.",
                why="The density of an action is the product over its components, so that its "
                "logarithm is their sum: one number for each action, as the value is. Here each "
                "component is taken for an action of its own.",
                fix="log_prob(action).sum(-1, keepdim=True), or Independent(Normal(...), 1).",
                site=self._componentwise[whole],
                parameters=live_in(self.session, call.inputs),
                related=(call.site,),
            )

    def _follow_sample(self, call: OpCall, sample: Sample) -> None:
        result, short = call.outputs[0], call.short.rstrip("_") or call.short
        if not result.is_floating_point():
            return
        if short in _SAME:
            self._samples[result] = sample
        elif short in _SQUASH:
            # bounds that no value reaches change nothing
            if short not in ("clamp", "clip") or not torch.equal(result, call.inputs[0]):
                self._samples[result] = replace(sample, squashed=short, squashed_at=call.site)
        elif short in _INVERSE and sample.squashed:
            self._samples[result] = replace(sample, squashed="", squashed_at=None)
        elif short in _SCALE and len(call.args) == 2 and type(call.args[1]) in (int, float):
            number = float(call.args[1]) or 1.0
            factor = number if short == "mul" else 1 / number
            self._samples[result] = replace(sample, scale=sample.scale * factor)

    def _follow_score(self, call: OpCall) -> None:
        result = call.outputs[0]
        carrier = next(t for t in call.inputs if t in self._scores)
        score: Score = self._scores[carrier]
        others = [t for t in call.inputs if t is not carrier]
        if call.short in _TERMS:
            # other terms of the same density (its correction); a critic's value is another thing
            taints = [t for t in map(self.session.taint_of, others) if t is not None]
            if all(not t.depends & ~score.depends for t in taints):
                self._scores[result] = score
        elif call.short in ("mul", "multiply") and len(others) == 1:
            weight = others[0]
            if not weight.requires_grad and _is_reward(weight):
                self._live_action(score, live_in(self.session, [carrier]))
            elif weight.numel() == 1:
                self._scores[result] = score

    def _live_action(self, score: Score, live: int) -> None:
        self.report(
            24,
            Severity.ERROR,
            "A score-function loss is taken at an action that carries gradients itself.",
            why="log_prob(action) * advantage holds the action fixed; here the action depends on "
            "the distribution's parameters (rsample), so gradients also flow through it, which "
            "cancels or reverses the estimate: the two derivatives of a location cancel exactly.",
            fix="Draw with .sample(), or use log_prob(action.detach()).",
            site=score.action,
            parameters=live,
            related=(score.density,),
        )


def _family(distribution: Any) -> type:
    """The kind of distribution that draws, behind wrappers that only rename axes."""
    while isinstance(distribution, distributions.Independent):
        distribution = distribution.base_dist
    return type(distribution)


def _is_reward(weight: Tensor) -> bool:
    """A number per sample that is not a mask: an advantage, a return."""
    values = weight.detach()
    if values.numel() < 2 or not values.is_floating_point():
        return False
    mask = bool(((values == 0) | (values == 1)).all())
    return not mask and bool((values != values.reshape(-1)[0]).any())
