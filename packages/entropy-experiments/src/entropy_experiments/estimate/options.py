"""What an estimate speaks of and how it is computed: options that travel together."""

from __future__ import annotations

from dataclasses import dataclass

from entropy_experiments.estimate.first_order import PAIRED_WITH, SlopeForm, slope_estimand
from entropy_experiments.estimate.modes import Mode
from entropy_experiments.estimate.noise import REPACKINGS
from entropy_experiments.types import Estimand, Policy
from entropy_experiments.types.estimate import Entropy, Form, Prompts, Unit


@dataclass(frozen=True, kw_only=True)
class EstimatorOptions:
    """Options of every estimator of an analysis.

    Args:
        form: Of the measurement: "per_decision" (less variance) or "snis". The slope takes the form
            that is its exact derivative.
        unit: Entropy per "token" or per "sequence".
        entropy: "rao_blackwell" sums over the vocabulary, "simple" is -log p of the drawn token.
        prompts: A sample of a "population", or a "fixed" set: what the error bars speak of.
        horizon: max_new_tokens of the rollouts, if there was one.
        mode: How to differentiate; "auto" tries what the policy has.
        microbatch: Rollouts in a pass.
        repackings: Passes in other packings that give the measurement's noise floor.

    Raises:
        ValueError: If `form` has no slope, or `microbatch` is below 1.

    Examples:
        >>> EstimatorOptions(form="snis").slope_form
        'matched'
    """

    form: Form = "per_decision"
    unit: Unit = "token"
    entropy: Entropy = "rao_blackwell"
    prompts: Prompts = "population"
    horizon: int | None = None
    mode: Mode = "auto"
    microbatch: int = 8
    repackings: int = REPACKINGS

    def __post_init__(self) -> None:
        if self.form not in PAIRED_WITH.values():
            raise ValueError(
                f"EstimatorOptions.form is {self.form!r}; expected one of "
                f"{tuple(PAIRED_WITH.values())}, which have a slope."
            )
        if self.microbatch < 1:
            raise ValueError(
                f"EstimatorOptions.microbatch is {self.microbatch}; expected at least 1."
            )

    @property
    def slope_form(self) -> SlopeForm:
        """The form of the slope whose measurement is `form`."""
        return next(slope for slope, paired in PAIRED_WITH.items() if paired == self.form)

    def estimand(self, policy: Policy) -> Estimand:
        """What slopes and measurements of this policy speak of."""
        return slope_estimand(
            policy,
            form=self.slope_form,
            unit=self.unit,
            entropy=self.entropy,
            prompts=self.prompts,
            horizon=self.horizon,
        )
