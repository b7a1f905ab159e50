"""Answers to a what-if: what is predicted, and what the step made for real says of it.

    measured = frozen prediction + (denominator and clip) + curvature + rest

Three questions, three rules (docs/tutorial_influence.md has them in words):

    agrees      the frozen prediction lies in the measured interval
    accounted   the paired interval of the rest covers 0, or |rest| <= 1 % of |measured|
    effect      the predicted *change* against the paired interval of the measured one

The measured interval is mostly the sample's doing, and the prediction shares the sample: a bad
prediction can well lie inside. So `confirmed` asks for all of the first two, and for a rest and a
curvature that are at most half of the made step's own slope.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from entropy_experiments.types import Estimate

DENOMINATOR, CURVATURE = "denominator and clip", "curvature"
NEGLIGIBLE = 0.01
"""Of the measured change: a rest this small needs no explanation, however sharp its interval."""
HALF = 0.5
"""Of the slope's share: with more in curvature or rest, the step is beyond the linear range."""
FROZEN = "advantages, normalisers, P and clip factor as they were"
Effect = Literal["as predicted", "not as predicted", "too noisy to tell"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction:
    """First-order entropy change of the counterfactual step, in nats."""

    name: str
    gradient: float
    baseline: Mapping[str, float]
    recorded: float
    """The same of the step as it was made."""
    stderr: float | None
    """Of `total`, over folds of E's prompts; None: the table has no folds."""
    change_stderr: float | None
    """Of `change`: paired, since both come from the same folds."""
    lr: float
    curvature: float | None
    """lr^2 / 2 H'', if the recorded step's was given and nothing but the learning rate changed."""
    tokens: int
    """Tokens whose coefficients changed."""
    notes: tuple[str, ...]
    value_NS: Tensor = field(repr=False)

    @property
    def total(self) -> float:
        return self.gradient + sum(self.baseline.values())

    @property
    def change(self) -> float:
        return self.total - self.recorded

    def __str__(self) -> str:
        error = "" if self.change_stderr is None else f" +- {self.change_stderr:.0e}"
        head = (
            f"{self.name}: predicted {self.total:+.4g} nats instead of {self.recorded:+.4g}, a "
            f"difference of {self.change:+.3g}{error} ({self.tokens} tokens changed; {FROZEN})"
        )
        return "\n".join([head, *(f"  {note}" for note in self.notes)])


@dataclass(frozen=True, kw_only=True, eq=False)
class Confirmation:
    """One counterfactual step, predicted in two ways and measured; nats of the step."""

    prediction: Prediction
    """From the token table."""
    frozen: Estimate
    """The same number from the model: the new gradient, the recorded P and clip factor."""
    recomputed: Estimate
    """With Adam's denominator and the clip factor made anew."""
    curvature: Estimate | None
    """lr^2 / 2 times the second derivative; None: not defined below top_p 1."""
    measured: Estimate
    measured_recorded: Estimate
    """The step as it was made, measured on the same rollouts."""
    clip_factors: tuple[float, float]
    """Recorded and recomputed."""

    @property
    def change(self) -> Estimate:
        """What the intervention did, measured; paired, so far sharper than either measurement."""
        return self.measured - self.measured_recorded

    @property
    def explained(self) -> dict[str, Estimate]:
        """What the frozen prediction leaves out."""
        found = {DENOMINATOR: self.recomputed - self.frozen}
        return found if self.curvature is None else {**found, CURVATURE: self.curvature}

    @property
    def difference(self) -> Estimate:
        """Measured minus frozen prediction, with its paired interval."""
        return self.measured - self.frozen

    @property
    def rest(self) -> Estimate:
        """What the explanation leaves of the difference: third order and higher."""
        gap = self.measured - self.recomputed
        return gap if self.curvature is None else gap - self.curvature

    @property
    def agrees(self) -> bool | None:
        """The frozen prediction lies in the measured interval; None: there is no interval."""
        if self.measured.interval is None:
            return None
        return self.measured.covers(self.prediction.total)

    @property
    def accounted(self) -> bool | None:
        """Denominator, clip and curvature are all of the difference, as far as can be seen."""
        if self.rest.interval is None:
            return None
        small = abs(self.rest.value) <= NEGLIGIBLE * abs(self.measured.value)
        return small or self.rest.covers(0.0)

    @property
    def beyond_linear(self) -> bool:
        """Curvature or rest is more than half of what the slope of the step as made gives."""
        bend = 0.0 if self.curvature is None else self.curvature.value
        return max(abs(bend), abs(self.rest.value)) > HALF * abs(self.recomputed.value)

    @property
    def confirmed(self) -> bool | None:
        """The prediction agrees, and for the right reason."""
        if self.agrees is None or self.accounted is None:
            return None
        return self.agrees and self.accounted and not self.beyond_linear

    @property
    def effect(self) -> Effect | None:
        """The predicted *change* against the paired interval of the measured one.

        Under Adam it often fails where `agrees` holds: the denominator gives back much of what
        the intervention took out of the gradient. An interval that has both 0 and the prediction
        in it, and is wider than the prediction, says nothing. (But a prediction of exactly 0 is
        met where the interval is negligible beside the step.)
        """
        seen, expected = self.change, self.prediction.change
        if seen.interval is None:
            return None
        if not seen.covers(expected):
            return "not as predicted"
        half = (seen.interval[1] - seen.interval[0]) / 2
        sharp = expected == 0 and half <= NEGLIGIBLE * abs(self.measured.value)
        if seen.covers(0.0) and abs(expected) < half and not sharp:
            return "too noisy to tell"
        return "as predicted"

    @property
    def effect_agrees(self) -> bool | None:
        """`effect` as an answer; None: there is no interval, or it is too wide to tell."""
        return {"as predicted": True, "not as predicted": False}.get(self.effect or "")

    @property
    def effect_in_words(self) -> str | None:
        """`effect`, and what is behind it where it is another than predicted."""
        if self.effect != "not as predicted":
            return self.effect
        gap = self.explained[DENOMINATOR].value
        if abs(gap) >= HALF * abs(self.change.value - self.prediction.change):
            return "not as predicted (Adam divides by the new gradient's size)"
        return "not as predicted (the steps bend)"

    @property
    def verdict(self) -> str:
        """In words: do prediction and measurement agree, and if not, why not."""
        shares = ", ".join(f"{name} {part.value:+.3g}" for name, part in self.explained.items())
        parted = f"measured - predicted = {self.difference}; of that {shares}"
        left = f"{parted}, which leaves {self.rest.value:+.3g}"
        if self.agrees is None or self.accounted is None:
            return f"not confirmed, for want of an interval: {left}"
        if self.confirmed:
            return f"confirmed: the frozen prediction is inside the measured interval. {left}"
        where = "inside" if self.agrees else "outside"
        joint = "but" if self.agrees and not self.accounted else "and"
        settled = f"{joint} {'explained' if self.accounted else 'NOT explained'}"
        text = f"{where} the measured interval, {settled}: {left}"
        if self.beyond_linear:
            text += (
                f". The step is beyond the linear range: curvature or rest is over {HALF:.0%} of "
                "the slope's share (take a smaller learning rate)"
            )
        elif not self.accounted:
            text += (
                ". The step is beyond second order (take a smaller learning rate), or the "
                "measurement is not to be trusted"
            )
        return text

    def __str__(self) -> str:
        effect = self.effect_in_words
        return "\n".join(
            [
                f"{self.prediction.name}: its effect predicted {self.prediction.change:+.4g}, "
                f"measured {self.change}" + ("" if effect is None else f", {effect}"),
                f"  the whole step predicted {self.prediction.total:+.4g}, measured "
                f"{self.measured}",
                f"  {self.verdict}",
                *(f"  {note}" for note in self.prediction.notes),
            ]
        )
