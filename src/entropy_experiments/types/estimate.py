"""A number with its meaning, its error bar, and a verdict on whether to believe it.

Every estimator is a smooth function of weighted means of per-rollout sums. Leaving out one unit at
a time gives *influence values* I_c = (1 - w_c / W)(f - f_without_c), W the weight of c's stratum:

    variance = sum over strata of n / (n - 1) * sum_c (I_c - mean I)^2,    bias = - sum_c I_c

For a population of prompts the units are prompts in one stratum; for a fixed set of prompts they
are rollouts, and each prompt is a stratum. Keeping the I_c is what gives `a - b` a paired interval.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import hypot, isfinite, sqrt
from typing import Any, Literal

import torch
from scipy.special import stdtrit
from torch import Tensor

MIN_PROMPTS = 5
CONFIDENCE = 0.95
BIAS_SHARE_OF_STDERR = 0.25

Prompts = Literal["population", "fixed"]
Unit = Literal["token", "sequence"]
Form = Literal["snis", "per_decision", "resampled"]
Entropy = Literal["rao_blackwell", "simple"]


@dataclass(frozen=True, kw_only=True)
class Estimand:
    """Which entropy is meant. Numbers with different estimands are never compared."""

    prompts: Prompts = "population"
    temperature: float = 1.0
    top_p: float = 1.0
    horizon: int | None = None
    """max_new_tokens, a stopping rule on the prefix; truncated rollouts count as they are."""
    unit: Unit = "token"
    form: Form = "per_decision"
    """How rollouts stand for the changed policy; a slope has the form of what it differentiates."""
    entropy: Entropy = "rao_blackwell"
    """The entropy of each next-token law, or "simple": minus the log-prob of the token drawn."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("prompts", ("population", "fixed")),
            ("unit", ("token", "sequence")),
            ("form", ("snis", "per_decision", "resampled")),
            ("entropy", ("rao_blackwell", "simple")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"Estimand.{name} is {getattr(self, name)!r}; expected one of {allowed}."
                )
        if not (isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"Estimand.temperature is {self.temperature}; expected above 0.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"Estimand.top_p is {self.top_p}; expected in (0, 1].")

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
    drawn: bool = True
    """False for exact probabilities: an enumeration is no sample and has no sampling bias."""

    @property
    def bias(self) -> float:
        return -float(self.value_C.sum()) if self.drawn else 0.0

    @property
    def counts(self) -> Tensor:
        return torch.unique(self.stratum_C, return_counts=True)[1]

    @property
    def degrees_of_freedom(self) -> int:
        return int((self.counts - 1).sum())

    @property
    def variance(self) -> float | None:
        """None where a stratum has a single unit: its spread cannot be seen."""
        if bool((self.counts < 2).any()):
            return None
        _, index_C, count = torch.unique(self.stratum_C, return_inverse=True, return_counts=True)
        count = count.to(self.value_C.dtype)
        mean = torch.zeros_like(count).index_add(0, index_C, self.value_C) / count
        squares_C = (self.value_C - mean[index_C]) ** 2
        squares = torch.zeros_like(count).index_add(0, index_C, squares_C)
        return float((squares * count / (count - 1)).sum())

    @property
    def key(self) -> str:
        """Equal keys: value_C can be subtracted entry by entry."""
        one_stratum = int(self.stratum_C.max() - self.stratum_C.min()) == 0
        ids = self.prompt_C.to("cpu", torch.int64).numpy().tobytes()
        # Prompts of a population pair up whatever was sampled for them; rollouts of a fixed
        # set pair up only with themselves.
        name = "population" if one_stratum and len(self.prompt_C.unique()) > 1 else self.sample
        return f"{name}:{hashlib.sha256(ids).hexdigest()[:16]}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimate:
    """Make one with `Estimate.build`; subtract two for a paired difference."""

    value: float
    stderr: float | None
    interval: tuple[float, float] | None
    estimand: Estimand
    influences: tuple[Influence, ...]
    """One per independent sample."""
    plug_in: float
    """The value before any bias was subtracted."""
    bias: float
    noise_floor: float | None
    diagnostics: Mapping[str, Any] = field(default_factory=dict)
    trusted: bool = True
    why_not: tuple[str, ...] = ()

    @classmethod
    def build(
        cls,
        *,
        plug_in: float,
        estimand: Estimand,
        influences: Iterable[Influence] = (),
        noise_floor: float | None = None,
        diagnostics: Mapping[str, Any] | None = None,
        why_not: Iterable[str] = (),
    ) -> Estimate:
        """Error bar, bias and trust from influence values. Bias above SE/4 is subtracted."""
        influences, reasons = tuple(influences), list(why_not)
        if not isfinite(plug_in):
            raise ValueError(
                f"Estimate is {plug_in}; expected a finite number. The weights overflowed, or the "
                "scores were not finite: take a smaller step."
            )
        stderr, dof = _stderr(influences)
        bias = sum(influence.bias for influence in influences)
        value, interval = plug_in, None
        if stderr is None:
            reasons.append(_no_stderr(influences))
        elif estimand.prompts == "population" and dof < MIN_PROMPTS - 1:
            reasons.append(
                f"{_prompts(influences)} prompts: an interval for a population needs at least "
                f"{MIN_PROMPTS}"
            )
        else:
            if abs(bias) > BIAS_SHARE_OF_STDERR * stderr:
                value = plug_in - bias
            half = float(stdtrit(dof, 0.5 + CONFIDENCE / 2)) * stderr
            interval = (value - half, value + half)
        if noise_floor is not None and abs(value) < noise_floor:
            reasons.append(f"|{value:.3g}| is below the noise floor {noise_floor:.3g}")
        return cls(
            value=value,
            stderr=stderr,
            interval=interval,
            estimand=estimand,
            influences=influences,
            plug_in=plug_in,
            bias=bias,
            noise_floor=noise_floor,
            diagnostics=dict(diagnostics or {}),
            trusted=not reasons,
            why_not=tuple(dict.fromkeys(reasons)),
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

    def __neg__(self) -> Estimate:
        return combine([(-1.0, self)])

    def __str__(self) -> str:
        bar = (
            "no interval"
            if self.interval is None
            else f"{CONFIDENCE:.0%} [{self.interval[0]:.4g}, {self.interval[1]:.4g}]"
        )
        doubt = "" if self.trusted else f"  not trusted: {'; '.join(self.why_not)}"
        return f"{self.value:.4g}  {bar}{doubt}"


def combine(terms: Iterable[tuple[float, Estimate]]) -> Estimate:
    """A linear combination; estimates of the same sample are paired, others independent."""
    terms = list(terms)
    first = terms[0][1]
    for _, estimate in terms:
        if not estimate.estimand.matches(first.estimand):
            raise ValueError(
                f"These estimates mean different things: {first.estimand} against "
                f"{estimate.estimand}. Compare a slope with the measurement it differentiates."
            )
    blocks: dict[str, Influence] = {}
    for factor, estimate in terms:
        for influence in estimate.influences:
            key = influence.key
            scaled_C = factor * influence.value_C
            if key in blocks:
                scaled_C = blocks[key].value_C + scaled_C
            blocks[key] = replace(influence, value_C=scaled_C)
    if first.estimand.prompts == "population":
        _refuse_overlap(tuple(blocks.values()))
    floors = [abs(c) * e.noise_floor for c, e in terms if e.noise_floor is not None]
    reasons = [reason for _, e in terms for reason in e.why_not if not _is_own(reason)]
    form = next(
        (e.estimand.form for _, e in terms if e.estimand.form != "resampled"), first.estimand.form
    )
    return Estimate.build(
        plug_in=sum(c * e.plug_in for c, e in terms),
        estimand=replace(first.estimand, form=form),
        influences=blocks.values(),
        noise_floor=hypot(*floors) if floors else None,
        diagnostics=first.diagnostics if len(terms) == 1 else {},
        why_not=reasons,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Attribution:
    """A change, the lines that explain it, and what they leave over."""

    total: Estimate
    lines: Mapping[str, Estimate]
    unexplained: Estimate

    @classmethod
    def of(cls, total: Estimate, lines: Mapping[str, Estimate]) -> Attribution:
        rest = [(1.0, total), *((-1.0, line) for line in lines.values())]
        return cls(total=total, lines=dict(lines), unexplained=combine(rest))


def _stderr(influences: tuple[Influence, ...]) -> tuple[float | None, float]:
    """Standard error and its degrees of freedom (Welch-Satterthwaite across samples)."""
    if not influences:
        return None, 0.0
    variances = [influence.variance for influence in influences]
    if any(v is None for v in variances):
        return None, 0.0
    known = [v for v in variances if v is not None]
    total = sum(known)
    freedom = [influence.degrees_of_freedom for influence in influences]
    if total == 0 or len(known) == 1:
        return sqrt(total), float(min(freedom))
    return sqrt(total), total**2 / sum(v**2 / f for v, f in zip(known, freedom, strict=True))


def _no_stderr(influences: tuple[Influence, ...]) -> str:
    if not influences:
        return "reverse mode gives no per-rollout terms, hence no standard error"
    if all(len(i.prompt_C.unique()) == 1 for i in influences):
        return f"1 prompts: an interval for a population needs at least {MIN_PROMPTS}"
    return "a prompt of the fixed set has one rollout only: no spread within it can be seen"


def _prompts(influences: tuple[Influence, ...]) -> int:
    return min(len(influence.prompt_C.unique()) for influence in influences)


def _is_own(reason: str) -> bool:
    """Reasons that `build` finds again for the combination itself."""
    return "noise floor" in reason or "an interval for a population" in reason


def _refuse_overlap(blocks: tuple[Influence, ...]) -> None:
    for i, a in enumerate(blocks):
        for b in blocks[i + 1 :]:
            shared = set(a.prompt_C.tolist()) & set(b.prompt_C.tolist())
            if shared:
                raise ValueError(
                    f"These estimates share {len(shared)} of their prompts, not all: neither a "
                    "paired nor an independent interval is right. Estimate both on the same "
                    "prompts, or on disjoint ones."
                )
