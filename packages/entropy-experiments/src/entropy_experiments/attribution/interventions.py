"""Interventions: what might have been done to the training loss of the recorded batch.

An intervention is a pure function from one `Counterfactual` loss to another. Every selection looks
at the recorded batch, so what was dropped before changes no mean, rank or count.

Clip-Cov and KL-Cov (PRIME-RL) go by cov_t = (A_t - mean A)(l_t - mean l) over counted tokens.
Clip-Cov takes the policy loss away from RATIO x all tokens, at least one, drawn at random from
those with LOW < cov < HIGH that PPO's clip has left alone. KL-Cov drops PPO's clip and adds
COEF |l - l_old| to the RATIO x all tokens, at least one, with the largest cov.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from entropy_experiments.attribution.counterfactual import ROUNDING, Counterfactual, Recorded
from entropy_experiments.attribution.proxies import covariance
from entropy_experiments.update.objective import UNCLIPPED, Objective

SIGNS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "<=": torch.le,
    ">=": torch.ge,
    "==": torch.eq,
    "!=": torch.ne,
    "<": torch.lt,
    ">": torch.gt,
}


class Intervention(Protocol):
    @property
    def name(self) -> str:
        """The text that `parse` reads."""
        ...

    def __call__(self, counterfactual: Counterfactual) -> Counterfactual: ...


def applied(interventions: Iterable[Intervention], recorded: Recorded) -> Counterfactual:
    """The loss after all of them, in order."""
    counterfactual = Counterfactual(
        recorded=recorded,
        objective=recorded.objective,
        advantage_NS=recorded.batch.advantage_NS,
        weight_NS=torch.ones_like(recorded.scores.logprob_NS),
        penalty_NS=None,
        lr=recorded.lr,
    )
    seen: set[str] = set()
    for intervention in interventions:
        key = intervention.name.partition("=")[0]
        if key in seen and not isinstance(intervention, Reweighted):
            raise ValueError(f"{key} is given twice; expected one value for it.")
        seen.add(key)
        counterfactual = intervention(counterfactual)
    return counterfactual


class Place(NamedTuple):
    """A rollout, or one of its response tokens."""

    rollout: int
    k: int | None = None

    def __str__(self) -> str:
        return f"{self.rollout}" if self.k is None else f"{self.rollout}.{self.k}"


class Comparison(NamedTuple):
    column: str
    sign: str
    number: float


@dataclass(frozen=True, kw_only=True)
class Selector:
    """Counted tokens for which every comparison holds."""

    text: str
    comparisons: tuple[Comparison, ...]

    def __call__(self, recorded: Recorded) -> Tensor:
        mask_NS = recorded.batch.counted_NS
        for column, sign, number in self.comparisons:
            mask_NS = mask_NS & SIGNS[sign](recorded.column(column), number)
        return mask_NS


@dataclass(frozen=True, kw_only=True)
class Reweighted:
    """Loss of some rollouts, tokens or selected tokens times a factor; dropped: times 0."""

    name: str
    factors: tuple[tuple[Place | Selector, float], ...]

    def __call__(self, counterfactual: Counterfactual) -> Counterfactual:
        recorded = counterfactual.recorded
        for target, factor in self.factors:
            select = target if isinstance(target, Selector) else _places(target)
            mask_NS = select(recorded) & recorded.batch.counted_NS
            if not bool(mask_NS.any()):
                what = target.text if isinstance(target, Selector) else f"token {target}"
                counterfactual = counterfactual.noting(
                    f"{what} selects no token that the loss counts"
                )
            counterfactual = counterfactual.times(torch.where(mask_NS, factor, 1.0))
        return counterfactual


@dataclass(frozen=True, kw_only=True)
class Objected:
    """Another value of one of the Objective's numbers."""

    field: str
    value: float | None

    @property
    def name(self) -> str:
        return f"{self.field}={'none' if self.value is None else f'{self.value:g}'}"

    def __call__(self, counterfactual: Counterfactual) -> Counterfactual:
        recorded = counterfactual.recorded
        if self.field == "beta" and self.value and recorded.batch.ref_logprob_NS is None:
            raise ValueError(
                f"{self.name} needs the reference policy's log-probs, and the update batch has no "
                f"ref_logprob_NS. Run the study with --what-if {self.name} once: it scores the "
                "reference of a LoRA checkpoint (the adapter off). For a full fine-tune, record it "
                "with the batch."
            )
        counterfactual = replace(
            counterfactual, objective=replace(counterfactual.objective, **{self.field: self.value})
        )
        if self.field in ("clip_low", "clip_high"):
            if counterfactual.objective.loss == "reinforce":
                return counterfactual.noting("reinforce has no ratio: a clip range changes nothing")
            if recorded.ratios_are_one:
                return counterfactual.noting("every ratio is 1: a clip range changes nothing")
        return counterfactual


@dataclass(frozen=True, kw_only=True)
class ClipCov:
    """No policy loss for some of the tokens with large covariance."""

    ratio: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    seed: int = 0

    @property
    def name(self) -> str:
        return f"clip_cov={self.ratio:g}:{self.low:g}:{self.high:g}:{self.seed}"

    def __call__(self, counterfactual: Counterfactual) -> Counterfactual:
        recorded = counterfactual.recorded
        cov_NS = covariance(recorded.batch, recorded.scores)
        open_NS = recorded.batch.counted_NS & (cov_NS > self.low) & (cov_NS < self.high)
        open_NS = open_NS & ~_clipped(recorded, counterfactual.objective)
        rows, columns = open_NS.nonzero(as_tuple=True)
        if not len(rows):
            largest = float(cov_NS[recorded.batch.counted_NS].max())
            return counterfactual.noting(
                f"{self.name} changes nothing: no token has a covariance between {self.low:g} and "
                f"{self.high:g} (the largest is {largest:.3g})"
            )
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.randperm(len(rows), generator=generator)[: _count(self.ratio, recorded)]
        advantage_NS = counterfactual.advantage_NS.clone()
        advantage_NS[rows[drawn], columns[drawn]] = 0.0
        note = f"Clip-Cov takes {len(drawn)} of {len(rows)} tokens in its range (seed {self.seed})"
        return replace(counterfactual, advantage_NS=advantage_NS).noting(note)


@dataclass(frozen=True, kw_only=True)
class KLCov:
    """No PPO clip; |l - l_old| is paid by the tokens with the largest covariance."""

    ratio: float = 2e-4
    coef: float = 1.0

    @property
    def name(self) -> str:
        return f"kl_cov={self.ratio:g}:{self.coef:g}"

    def __call__(self, counterfactual: Counterfactual) -> Counterfactual:
        recorded = counterfactual.recorded
        counted_NS = recorded.batch.counted_NS
        cov_NS = torch.where(counted_NS, covariance(recorded.batch, recorded.scores), -torch.inf)
        top = cov_NS.flatten().topk(_count(self.ratio, recorded)).indices
        # At ratio 1 the derivative of |l - l_old| is 0; what rounding leaves there has no sign.
        away = (recorded.log_ratio_NS.abs() > ROUNDING).flatten()
        penalty_NS = torch.zeros_like(recorded.scores.logprob_NS)
        penalty_NS.view(-1)[top] = torch.where(away[top], self.coef, 0.0).to(penalty_NS)
        objective = replace(counterfactual.objective, clip_low=None, clip_high=None)
        counterfactual = replace(counterfactual, objective=objective, penalty_NS=penalty_NS)
        if recorded.ratios_are_one:
            return counterfactual.noting(
                "every ratio is 1, where |l - l_old| has derivative 0 and no clip acts: KL-Cov "
                "changes nothing in the first step of a batch"
            )
        return counterfactual.noting(
            f"KL-Cov: {int(away[top].sum())} of its {len(top)} tokens have moved"
        )


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    lr: float

    @property
    def name(self) -> str:
        return f"lr={self.lr:g}"

    def __call__(self, counterfactual: Counterfactual) -> Counterfactual:
        note = (
            "momentum and weight decay scale with the learning rate too; curvature with its square"
        )
        return replace(counterfactual, lr=self.lr).noting(note)


def _count(ratio: float, recorded: Recorded) -> int:
    return max(int(ratio * int(recorded.batch.counted_NS.sum())), 1)


def _clipped(recorded: Recorded, objective: Objective) -> Tensor:
    """Tokens whose policy loss PPO's clip has made flat."""
    if objective.loss in UNCLIPPED:
        return torch.zeros_like(recorded.batch.counted_NS)
    ratio_NS = objective.importance_ratio(recorded.scores.logprob_NS, recorded.batch)
    a_NS = recorded.batch.advantage_NS
    clipped_NS = torch.zeros_like(recorded.batch.counted_NS)
    if objective.clip_high is not None:
        clipped_NS = clipped_NS | ((a_NS > 0) & (ratio_NS > 1 + objective.clip_high))
    if objective.clip_low is not None:
        clipped_NS = clipped_NS | ((a_NS < 0) & (ratio_NS < 1 - objective.clip_low))
    return clipped_NS


def _places(place: Place) -> Callable[[Recorded], Tensor]:
    def select(recorded: Recorded) -> Tensor:
        rollouts = recorded.batch.rollouts
        if not 0 <= place.rollout < len(rollouts):
            raise ValueError(
                f"Rollout {place.rollout} is not in the update batch; expected 0 to "
                f"{len(rollouts) - 1}."
            )
        mask_NS = torch.zeros_like(rollouts.response_NS)
        mask_NS[place.rollout] = rollouts.response_NS[place.rollout]
        if place.k is None:
            return mask_NS
        tokens = int(rollouts.tokens_N[place.rollout])
        if not 0 <= place.k < tokens:
            raise ValueError(
                f"Rollout {place.rollout} has no response token {place.k}; expected 0 to "
                f"{tokens - 1}."
            )
        return mask_NS & (recorded.column("k") == place.k)

    return select
