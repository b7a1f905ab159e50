"""What is estimated and how it is computed: options that travel together.

    options = EstimatorOptions(unit="sequence", horizon=256)
    slope = first_order(policy, rollouts, direction, options)
    change = measured(policy, rollouts, direction, lr, options)

Every estimator takes `options`, single keywords, or both; a keyword wins over the options. Forms
come in pairs: a slope is the exact derivative of one measurement,

    matched  of  snis            to_go  of  per_decision

so `EstimatorOptions.form` names the measurement and slopes follow. As a keyword, `form` is in the
words of the function that takes it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, TypedDict

from entropy_experiments.estimate.modes import Mode
from entropy_experiments.estimate.noise import REPACKINGS
from entropy_experiments.estimate.ratio import estimand_of
from entropy_experiments.types import Estimand, Policy
from entropy_experiments.types.estimate import Entropy, Form, Prompts, Unit

SlopeForm = Literal["matched", "to_go"]
PAIRED_WITH: dict[SlopeForm, Form] = {"matched": "snis", "to_go": "per_decision"}
"""By the form of a slope: the measurement that it differentiates."""
LEAST = {"microbatch": 1, "forward_microbatch": 1, "horizon": 1, "repackings": 0}
"""Of the options that are counts."""


@dataclass(frozen=True, kw_only=True)
class EstimatorOptions:
    """Options of every estimator of an analysis.

    Args:
        form: Of the measurement: "per_decision" (less variance) or "snis". The slope takes the form
            that is its exact derivative.
        unit: Entropy per "token" or per "sequence".
        entropy: "rao_blackwell" sums over the vocabulary, "simple" is -log p of the drawn token.
        prompts: A sample of a "population", or a "fixed" set: what the error bars refer to.
        horizon: max_new_tokens of the rollouts, if there was one.
        mode: How to differentiate; "auto" tries what the policy has.
        microbatch: Rollouts in a pass with derivatives.
        forward_microbatch: Rollouts in a pass without; None: as many.
        repackings: Passes in other packings that give noise floors.

    Raises:
        ValueError: If `form` has no slope, or a count is no whole number or too small.

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
    forward_microbatch: int | None = None
    repackings: int = REPACKINGS

    def __post_init__(self) -> None:
        if self.form not in PAIRED_WITH.values():
            raise ValueError(
                f"EstimatorOptions.form is {self.form!r}; expected one of "
                f"{tuple(PAIRED_WITH.values())}, which have a slope."
            )
        for name, least in LEAST.items():
            count = getattr(self, name)
            if count is None and name in ("forward_microbatch", "horizon"):
                continue
            if not isinstance(count, Integral) or isinstance(count, bool) or int(count) < least:
                raise ValueError(
                    f"EstimatorOptions.{name} is {count!r}; expected at least {least}, a whole "
                    "number."
                )

    @property
    def slope_form(self) -> SlopeForm:
        """The form of the slope whose measurement is `form`."""
        return next(slope for slope, paired in PAIRED_WITH.items() if paired == self.form)

    @property
    def forward_size(self) -> int:
        """Rollouts in a pass without derivatives."""
        return self.forward_microbatch or self.microbatch

    def estimand(self, policy: Policy) -> Estimand:
        """What slopes and measurements of this policy estimate."""
        return estimand_of(
            policy,
            prompts=self.prompts,
            unit=self.unit,
            form=self.form,
            entropy=self.entropy,
            horizon=self.horizon,
        )


class RewardKeywords(TypedDict, total=False):
    """Options of a reward's estimators; a reward has one form and one unit."""

    prompts: Prompts
    horizon: int | None
    mode: Mode
    microbatch: int
    repackings: int


class SlopeKeywords(RewardKeywords, total=False):
    """Options of a slope, one by one: fields of EstimatorOptions."""

    form: SlopeForm
    unit: Unit
    entropy: Entropy


class LevelKeywords(TypedDict, total=False):
    """Options of the entropy itself, one by one: fields of EstimatorOptions."""

    unit: Unit
    entropy: Entropy
    prompts: Prompts
    horizon: int | None
    microbatch: int


class MeasureKeywords(LevelKeywords, total=False):
    """Options of a measurement, one by one: fields of EstimatorOptions."""

    form: Form
    repackings: int


def slope_options(options: EstimatorOptions | None, keywords: SlopeKeywords) -> EstimatorOptions:
    """The options with these keywords in place of theirs; `form` is a slope's."""
    changes: dict[str, Any] = dict(keywords)
    if "form" in changes:
        changes["form"] = _paired(changes["form"])
    return _changed(options, changes)


def measure_options(
    options: EstimatorOptions | None, keywords: MeasureKeywords | LevelKeywords
) -> EstimatorOptions:
    """The options with these keywords in place of theirs; `form` is a measurement's."""
    return _changed(options, dict(keywords))


def reward_options(options: EstimatorOptions | None, keywords: RewardKeywords) -> EstimatorOptions:
    """The options with these keywords in place of theirs."""
    return _changed(options, dict(keywords))


def slope_estimand(
    policy: Policy,
    *,
    form: SlopeForm,
    unit: Unit = "token",
    entropy: Entropy = "rao_blackwell",
    prompts: Prompts = "population",
    horizon: int | None = None,
) -> Estimand:
    """What a slope of this form estimates: the measurement it differentiates."""
    return estimand_of(
        policy, prompts=prompts, unit=unit, form=_paired(form), entropy=entropy, horizon=horizon
    )


def _paired(form: SlopeForm) -> Form:
    if form not in PAIRED_WITH:
        raise ValueError(f"form={form!r}; expected one of {tuple(PAIRED_WITH)}.")
    return PAIRED_WITH[form]


def _changed(options: EstimatorOptions | None, changes: dict[str, Any]) -> EstimatorOptions:
    if options is not None and not isinstance(options, EstimatorOptions):
        raise TypeError(
            f"Got a {type(options).__name__} as options; expected EstimatorOptions, or single "
            "keywords such as microbatch=8."
        )
    if "microbatch" in changes:  # one size for all passes of this call
        changes["forward_microbatch"] = None
    return replace(options or EstimatorOptions(), **changes)
