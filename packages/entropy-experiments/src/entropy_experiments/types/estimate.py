"""A number with its meaning, its error bar, and a verdict on whether to believe it.

Every estimator is a smooth function of weighted means of per-rollout sums. Leaving out one unit at
a time gives *influence values* I_c = (1 - w_c / W)(f - f_without_c), W the weight of c's stratum:

    variance = sum over strata of n / (n - 1) * sum_c (I_c - mean I)^2,    bias = - sum_c I_c

For a population of prompts the units are prompts in one stratum; for a fixed set of prompts they
are rollouts, and each prompt is a stratum. Keeping the I_c is what gives `a - b` a paired interval.

Intervals are Student's t. Its degrees of freedom are those of the variance *estimate*: n - 1 for
well-behaved units, fewer where a few units carry most of it (their kurtosis tells), since a spread
seen in a few units is itself uncertain. The bias is reported, not subtracted: subtracting it
widens the spread by more than it centres it, and a value that was shifted in one line but not in
another no longer adds up (LOG.md has the numbers).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import hypot, isfinite, sqrt
from typing import Any, Literal

import torch
from scipy.special import stdtrit
from torch import Tensor

MIN_PROMPTS = 5
NO_WIDTH = (
    "every unit gives exactly the same number: no spread can be seen, and the interval has no width"
)
CONFIDENCE = 0.95
TINY = 1e-150

Prompts = Literal["population", "fixed"]
Unit = Literal["token", "sequence"]
Form = Literal["snis", "per_decision", "resampled"]
Entropy = Literal["rao_blackwell", "simple"]
Quantity = Literal["entropy", "reward"]


@dataclass(frozen=True, kw_only=True)
class Estimand:
    """Which entropy, or reward, is meant. Numbers with different estimands are never compared.

    Args:
        prompts: A sample of a "population" of prompts, or a "fixed" set.
        temperature: Of the policy.
        top_p: Of the policy; 1 is the full softmax.
        horizon: max_new_tokens, a stopping rule on the prefix; truncated rollouts count as they
            are.
        unit: Per "token" or per "sequence".
        form: How rollouts stand for the changed policy; a slope has the form of what it
            differentiates.
        entropy: The entropy of each next-token distribution ("rao_blackwell"), or "simple": minus
            the log-prob of the token drawn.
        quantity: The policy's "entropy", or the "reward" it expects (of which `entropy` then says
            nothing).

    Raises:
        ValueError: If an option has an unknown value.

    Examples:
        >>> Estimand().matches(Estimand(unit="sequence"))
        False
        >>> Estimand(temperature=0.7).policy
        'full softmax, temperature 0.7'
    """

    prompts: Prompts = "population"
    temperature: float = 1.0
    top_p: float = 1.0
    horizon: int | None = None
    unit: Unit = "token"
    form: Form = "per_decision"
    entropy: Entropy = "rao_blackwell"
    quantity: Quantity = "entropy"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("prompts", ("population", "fixed")),
            ("unit", ("token", "sequence")),
            ("form", ("snis", "per_decision", "resampled")),
            ("entropy", ("rao_blackwell", "simple")),
            ("quantity", ("entropy", "reward")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"Estimand.{name} is {getattr(self, name)!r}; expected one of {allowed}."
                )
        if not (isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"Estimand.temperature is {self.temperature}; expected above 0.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Estimand.top_p is {self.top_p}; expected in (0, 1].")

    @property
    def policy(self) -> str:
        """The distribution that is meant, in words."""
        kept = "full softmax" if self.top_p == 1 else f"top_p = {self.top_p:g}"
        return f"{kept}, temperature {self.temperature:g}"

    def matches(self, other: Estimand) -> bool:
        """Equal, but that fresh samples (form "resampled") may check either weighted form."""
        if "resampled" in (self.form, other.form):
            return replace(self, form="resampled") == replace(other, form="resampled")
        return self == other


@dataclass(frozen=True, kw_only=True, eq=False)
class Influence:
    """Influence values of one sample: the units that a resampling would redraw."""

    value_C: Tensor
    prompt_C: Tensor
    stratum_C: Tensor
    sample: str
    """Fingerprint of the rollouts."""

    @property
    def bias(self) -> float:
        return -float(self.value_C.sum())

    @property
    def prompts(self) -> int:
        return len(self.prompt_C.unique())

    def variance(self) -> tuple[float, float] | None:
        """(variance, its degrees of freedom); None if a stratum has a single unit."""
        _, index_C, count = torch.unique(self.stratum_C, return_inverse=True, return_counts=True)
        if bool((count < 2).any()):
            return None
        count = count.to(self.value_C.dtype)
        free = count - 1

        def total(x_C: Tensor) -> Tensor:
            return torch.zeros_like(count).index_add(0, index_C, x_C)

        squares_C = (self.value_C - (total(self.value_C) / count)[index_C]) ** 2
        squares = total(squares_C)
        part = squares * count / free
        whole = float(part.sum())
        if whole == 0:
            return 0.0, float(free.sum())
        kurtosis = count * total(squares_C**2) / squares.clamp_min(TINY) ** 2
        # Satterthwaite: part^2 overestimates its own square by (free + 2) / free.
        excess = ((kurtosis - 1) / 2).clamp_min(1.0)
        spread = float((part**2 * excess / (free + (2 if len(count) > 1 else 0))).sum())
        return whole, min(float(free.sum()), whole**2 / spread)

    @property
    def key(self) -> str:
        """Equal keys: value_C can be subtracted entry by entry."""
        one_stratum = int(self.stratum_C.max() - self.stratum_C.min()) == 0
        ids = self.prompt_C.to("cpu", torch.int64).numpy().tobytes()
        # Prompts of a population pair up whatever was sampled for them; rollouts of a fixed
        # set pair up only with themselves.
        name = "population" if one_stratum and self.prompts > 1 else self.sample
        return f"{name}:{hashlib.sha256(ids).hexdigest()[:16]}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    """A number with its error bar, what it means, and whether to trust it.

    Estimators return it; `a - b`, `a + b` and `2.0 * a` keep the pairing of samples, so that a
    difference on the same prompts has the narrow interval that it deserves.

    Args:
        value: The number, in nats (or in reward).
        stderr: Its standard error; None where none can be computed.
        interval: 95 %, by Student's t.
        estimand: What is estimated.
        influences: One per independent sample.
        bias: By the jackknife, of order 1/N; `value - bias` is less biased and more spread.
        noise_floor: Size of the changes that rounding alone makes.
        diagnostics: What the estimator says about how it came about.
        given_reasons: Doubts of whoever made the estimate, which a combination inherits.
        own_reasons: Doubts that follow from the numbers here, judged anew for a combination.

    Examples:
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> one, other = (entropy_level(policy, policy.draw(seed=seed)) for seed in (2, 3))
        >>> print(one)
        1.251  95% [1.226, 1.276]
        >>> print(one - other)
        0.004603  95% [-0.009724, 0.01893]
    """

    value: float
    stderr: float | None
    interval: tuple[float, float] | None
    estimand: Estimand
    influences: tuple[Influence, ...]
    bias: float
    noise_floor: float | None
    diagnostics: Mapping[str, Any] = field(default_factory=dict)
    given_reasons: tuple[str, ...] = ()
    own_reasons: tuple[str, ...] = ()

    @property
    def why_not(self) -> tuple[str, ...]:
        return (*self.given_reasons, *self.own_reasons)

    @property
    def trusted(self) -> bool:
        return not self.why_not

    def doubted(self, reason: str) -> Estimate:
        """The same number, not trusted for this reason."""
        return replace(self, given_reasons=(*self.given_reasons, reason))

    @classmethod
    def build(
        cls,
        *,
        value: float,
        estimand: Estimand,
        influences: Iterable[Influence] = (),
        noise_floor: float | None = None,
        diagnostics: Mapping[str, Any] | None = None,
        why_not: Iterable[str] = (),
        may_be_zero: bool = False,
    ) -> Estimate:
        """Error bar, bias and trust from influence values.

        `may_be_zero`: a difference below the noise floor is agreement, not a reason for doubt.
        """
        influences, own = tuple(influences), []
        if not isfinite(value):
            raise ValueError(
                f"Estimate is {value}; expected a finite number. The weights overflowed, or the "
                "scores were not finite: take a smaller step."
            )
        stderr, free = _stderr(influences)
        interval = None
        few = min((i.prompts for i in influences), default=0)
        if not influences:
            own.append("reverse mode gives no per-rollout terms, hence no standard error")
        elif estimand.prompts == "population" and few < MIN_PROMPTS:
            own.append(
                f"{few} prompt{'s' if few > 1 else ''}: an interval for a population needs at "
                f"least {MIN_PROMPTS} (an estimator's prompts='fixed' speaks of these alone)"
            )
        elif stderr is None:
            own.append("a prompt of the fixed set has one rollout: no spread within it can be seen")
        else:
            half = float(stdtrit(free, 0.5 + CONFIDENCE / 2)) * stderr
            interval = (value - half, value + half)
            if stderr == 0 and value != 0 and not may_be_zero:
                own.append(NO_WIDTH)
        if noise_floor is not None and abs(value) < noise_floor and not may_be_zero:
            own.append(f"|{value:.3g}| is below the noise floor {noise_floor:.3g}")
        return cls(
            value=value,
            stderr=stderr,
            interval=interval,
            estimand=estimand,
            influences=influences,
            bias=sum(influence.bias for influence in influences),
            noise_floor=noise_floor,
            diagnostics=dict(diagnostics or {}),
            given_reasons=tuple(dict.fromkeys(why_not)),
            own_reasons=tuple(own),
        )

    @property
    def per_prompt(self) -> dict[int, float]:
        """What each prompt adds to the value's deviation: the influence values by prompt."""
        out: dict[int, float] = {}
        for influence in self.influences:
            for prompt, value in zip(
                influence.prompt_C.tolist(), influence.value_C.tolist(), strict=True
            ):
                out[prompt] = out.get(prompt, 0.0) + value
        return out

    def covers(self, truth: float) -> bool:
        if self.interval is None:
            raise ValueError(f"This estimate has no interval: {'; '.join(self.why_not)}.")
        return self.interval[0] <= truth <= self.interval[1]

    def __sub__(self, other: Estimate) -> Estimate:
        return combine([(1.0, self), (-1.0, other)])

    def __add__(self, other: Estimate) -> Estimate:
        return combine([(1.0, self), (1.0, other)])

    def __rmul__(self, factor: float) -> Estimate:
        return combine([(factor, self)])

    __mul__ = __rmul__

    def __truediv__(self, divisor: float) -> Estimate:
        return combine([(1 / divisor, self)])

    def __float__(self) -> float:
        return self.value

    def __neg__(self) -> Estimate:
        return combine([(-1.0, self)])

    def __repr__(self) -> str:
        return f"Estimate({self})"

    def __str__(self) -> str:
        bar = (
            "no interval"
            if self.interval is None
            else f"{CONFIDENCE:.0%} [{self.interval[0]:.4g}, {self.interval[1]:.4g}]"
        )
        doubt = "" if self.trusted else f"  not trusted: {'; '.join(self.why_not)}"
        return f"{self.value:.4g}  {bar}{doubt}"


class LinearCombination:
    """A sum of factor x estimate, one term at a time.

    What is held grows by a number for each term, and by a block for each sample that is independent
    of those before it.

    Estimates of the same sample are paired entry by entry, others are independent.

    Examples:
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> total, level = LinearCombination(), entropy_level(policy, policy.draw(seed=2))
        >>> for _ in range(3):
        ...     total.add(-1.0, level)
        >>> total.estimate().value == -3 * level.value
        True
    """

    def __init__(self) -> None:
        self._values: list[float] = []  # added up at the end, as sum() does it
        self._floors: list[float] = []
        self._estimands: dict[Estimand, None] = {}
        self._blocks: dict[str, Influence] = {}
        self._reasons: dict[str, None] = {}
        self._barred = True
        self._first: tuple[float, Estimate] | None = None

    def add(self, factor: float, estimate: Estimate) -> None:
        """One more term.

        Raises:
            ValueError: If it means something else than a term before.
        """
        for other in self._estimands:
            if not other.matches(estimate.estimand):
                raise ValueError(
                    f"These estimates mean different things: {other} against {estimate.estimand}. "
                    "Compare a slope with the measurement it differentiates."
                )
        self._estimands[estimate.estimand] = None
        for influence in estimate.influences:
            key, scaled_C = influence.key, factor * influence.value_C
            if key in self._blocks:
                scaled_C = self._blocks[key].value_C + scaled_C
            self._blocks[key] = replace(influence, value_C=scaled_C)
        self._barred = self._barred and bool(estimate.influences)
        self._values.append(factor * estimate.value)
        if estimate.noise_floor is not None:
            self._floors.append(abs(factor) * estimate.noise_floor)
        self._reasons |= dict.fromkeys(estimate.given_reasons)
        if self._first is None:
            self._first = factor, estimate

    def estimate(self) -> Estimate:
        """The sum so far.

        Raises:
            ValueError: If there is no term yet, or two samples share prompts.
        """
        if self._first is None:
            raise ValueError("Got no estimates; expected one or more to combine.")
        factor, first = self._first
        # A term without an error bar leaves the combination without one.
        blocks = tuple(self._blocks.values()) if self._barred else ()
        if first.estimand.prompts == "population":
            _refuse_overlap(blocks)
        forms = [one.form for one in self._estimands if one.form != "resampled"]
        alone = len(self._values) == 1
        return Estimate.build(
            value=sum(self._values),
            estimand=replace(first.estimand, form=forms[0] if forms else "resampled"),
            influences=blocks,
            noise_floor=hypot(*self._floors) if self._floors else None,
            diagnostics=_scaled(factor, first.diagnostics) if alone else {},
            why_not=self._reasons,
            may_be_zero=not alone,
        )


def combine(terms: Iterable[tuple[float, Estimate]]) -> Estimate:
    """A linear combination; estimates of the same sample are paired, others independent."""
    total = LinearCombination()
    for factor, estimate in terms:
        total.add(factor, estimate)
    return total.estimate()


@dataclass(frozen=True, kw_only=True, eq=False)
class Attribution:
    """A change, the terms that explain it, and what they leave over.

    Args:
        total: The whole change.
        lines: The terms by name.
        unexplained: Total minus the terms.

    Examples:
        >>> import torch
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> step = {"table": torch.eye(5).double()}
        >>> direction = Direction(parts={"gradient": step}, lr=0.1)
        >>> print(first_order_by_part(policy, policy.draw(seed=2), direction))
        total        0.05168  95% [0.04132, 0.06203]
        gradient     0.05168  95% [0.04132, 0.06203]
        unexplained  0  95% [0, 0]
    """

    total: Estimate
    lines: Mapping[str, Estimate]
    unexplained: Estimate

    @classmethod
    def of(cls, total: Estimate, lines: Mapping[str, Estimate]) -> Attribution:
        rest = [(1.0, total), *((-1.0, line) for line in lines.values())]
        return cls(total=total, lines=dict(lines), unexplained=combine(rest))

    def doubted(self, reason: str) -> Attribution:
        """The same numbers, none of them trusted for this reason."""
        return Attribution(
            total=self.total.doubted(reason),
            lines={name: line.doubted(reason) for name, line in self.lines.items()},
            unexplained=self.unexplained.doubted(reason),
        )

    def __str__(self) -> str:
        rows = {"total": self.total, **self.lines, "unexplained": self.unexplained}
        return "\n".join(f"{name:12s} {estimate}" for name, estimate in rows.items())


def _stderr(influences: tuple[Influence, ...]) -> tuple[float | None, float]:
    """Standard error and its degrees of freedom (Welch-Satterthwaite across samples)."""
    variances = [influence.variance() for influence in influences]
    pairs = [pair for pair in variances if pair is not None]
    if not pairs or len(pairs) < len(variances):
        return None, 0.0
    total = sum(variance for variance, _ in pairs)
    if total == 0 or len(pairs) == 1:
        return sqrt(total), min(free for _, free in pairs)
    return sqrt(total), total**2 / sum(variance**2 / free for variance, free in pairs)


def _scaled(factor: float, diagnostics: Mapping[str, Any]) -> dict[str, Any]:
    """Estimates among the diagnostics scale with the value; counts and weights do not."""
    return {
        name: factor * value if isinstance(value, Estimate) else value
        for name, value in diagnostics.items()
    }


def _refuse_overlap(blocks: tuple[Influence, ...]) -> None:
    for a, b in combinations(blocks, 2):
        shared = set(a.prompt_C.tolist()) & set(b.prompt_C.tolist())
        if shared:
            raise ValueError(
                f"These estimates share {len(shared)} of their prompts, not all: neither a paired "
                "nor an independent interval is right. Estimate both on the same prompts, or on "
                "disjoint ones."
            )
