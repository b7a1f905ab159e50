"""Training losses as pure functions of scores; their token coefficients by autograd.

A loss is sum_ik c_ik loss_ik - entropy_coef * sum_ik e_ik h_ik. The weights c and e depend on the
masks alone and carry every normaliser, so a microbatch's share of the loss is exact on its own:

    reinforce   c = w_i                             loss_ik = -A l
    grpo        c = w_i / T_i                       loss_ik = -min(r A, clip(r) A) + beta KL
    dr_grpo     c = w_i / max_completion_length     r = exp(l - l_old), per token, or per sequence
    dapo        c = w_i / sum_j w_j T_j               the mean log-ratio of the rollout
    bnpo        c = w_i / (microbatches * sum over i's microbatch of w_j T_j)
    luspo       c = w_i                             as grpo
    cispo       c as dapo                           loss_ik = -min(r, clip_high) A l, ratio detached
    sapo        c as grpo                           loss_ik = -(4 / t) sigmoid(t (r - 1)) A, t by
                                                      the sign of A: sapo_positive, sapo_negative
    rloo        c as grpo                           as grpo with r the ratio of the whole rollout
    e = the c of bnpo, for every loss, as TRL does

With `kl_ratio` the KL of a token is r KL. `delta` bounds the ratio of min(r A, ...) from above,
where r is not clipped otherwise. `divisor`
replaces sum_j T_j of dapo and cispo: TRL counts the tokens of the whole generation batch, of which
a step may learn from a part.

w_i is 1/N in practice; T_i counts the tokens that the loss counts. Because nothing else depends on
the model, PPO clipping, KL and the entropy bonus need no derivative of their own:
`token_coefficients` differentiates two small arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from entropy_experiments.loss_names import Loss, Ratio
from entropy_experiments.types import Scores, UpdateBatch

UNCLIPPED = ("reinforce", "cispo", "sapo")
"""Losses in which no token's coefficient is zero for its ratio."""
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "rloo")
"""Losses of the clipped ratio. Every loss is in one of the two."""
KL = Literal["k1", "k2", "k3"]


class TokenWeights(NamedTuple):
    policy_NS: Tensor
    entropy_NS: Tensor

    def take(self, rows_N: Tensor, columns: slice) -> TokenWeights:
        return TokenWeights(self.policy_NS[rows_N, columns], self.entropy_NS[rows_N, columns])


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The training loss as a pure function of scores: `objective(scores, batch)`.

    Args:
        loss: Which loss; the module docstring has the formulas.
        clip_low: Ratios are clipped to [1 - clip_low, 1 + clip_high]; None switches a side off.
        clip_high: The other side.
        ratio: By "token", or by "sequence": the mean log-ratio of the rollout.
        beta: Coefficient of the KL to the reference model.
        kl: Its estimator.
        kl_ratio: The KL term is multiplied by the ratio (TRL's use_bias_correction_kl): another
            gradient even where the ratio is 1.
        entropy_coef: Coefficient of the entropy bonus.
        max_completion_length: What dr_grpo divides by.
        delta: Two-sided clipping: no ratio counts for more than this.
        sapo_positive: Temperature of sapo's soft gate where the advantage is positive; TRL's
            default.
        sapo_negative: The same where it is negative.
        divisor: Tokens that dapo and cispo divide by, if not those of the batch.

    Raises:
        ValueError: If an option has an unknown value, or dr_grpo has no `max_completion_length`.

    Examples:
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> batch = policy.update_batch(seed=1)
        >>> scores = policy.score(policy.params, batch.rollouts)
        >>> round(Objective(loss="dapo", entropy_coef=0.01)(scores, batch).item(), 4)
        -0.0125
    """

    loss: Loss = "grpo"
    clip_low: float | None = 0.2
    clip_high: float | None = 0.2
    ratio: Ratio = "token"
    beta: float = 0.0
    kl: KL = "k3"
    kl_ratio: bool = False
    entropy_coef: float = 0.0
    max_completion_length: int | None = None
    delta: float | None = None
    sapo_positive: float = 1.0
    sapo_negative: float = 1.05
    divisor: float | None = None

    def __post_init__(self) -> None:
        for name, kind in (("loss", Loss), ("kl", KL), ("ratio", Ratio)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"Objective.{name} is {getattr(self, name)!r}; expected one of "
                    f"{get_args(kind)}."
                )
        for name in ("delta", "divisor", "sapo_positive", "sapo_negative"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"Objective.{name} is {value}; expected a number above 0.")
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and value >= 0):
                raise ValueError(
                    f"Objective.{name} is {value}; expected 0 or above, or None, which switches "
                    "this side off."
                )
        for name in ("beta", "entropy_coef"):
            if not isfinite(getattr(self, name)):
                raise ValueError(
                    f"Objective.{name} is {getattr(self, name)}; expected a finite number."
                )
        if self.loss == "dr_grpo" and not self.max_completion_length:
            raise ValueError(
                "dr_grpo divides by max_completion_length, which was not given: set "
                "Objective(max_completion_length=...) to the trainer's value."
            )

    def __call__(self, scores: Scores, batch: UpdateBatch) -> Tensor:
        return self.weighted(scores, batch, self.token_weights(batch))

    def token_weights(self, batch: UpdateBatch) -> TokenWeights:
        """c and e of the module docstring, zero where the loss does not count."""
        weight_N, counted_NS = batch.rollouts.weight_N, batch.counted_NS
        tokens_N = counted_NS.sum(1).to(weight_N.dtype)
        share_N = _microbatch_share(batch, tokens_N)
        if self.loss in ("reinforce", "luspo"):
            per_token_N = weight_N
        elif self.loss in ("grpo", "sapo", "rloo"):
            per_token_N = weight_N / tokens_N.clamp_min(1.0)
        elif self.loss == "dr_grpo":
            assert self.max_completion_length is not None  # checked at construction
            per_token_N = weight_N / self.max_completion_length
        elif self.loss in ("dapo", "cispo"):
            mean = (weight_N * tokens_N).sum()
            if self.divisor is not None:
                mean = torch.full_like(mean, self.divisor) * batch.rollouts.share / len(weight_N)
            per_token_N = weight_N / mean
        elif self.loss == "bnpo":
            per_token_N = share_N
        else:
            raise _without_formula(self.loss, "token_weights")

        def spread(x_N: Tensor) -> Tensor:
            return torch.where(counted_NS, x_N[:, None], 0.0)

        return TokenWeights(spread(per_token_N), spread(share_N))

    def weighted(self, scores: Scores, batch: UpdateBatch, weights: TokenWeights) -> Tensor:
        """The loss of a batch, or of a part of one under the whole's weights."""
        counted_NS = batch.counted_NS
        dtype = torch.promote_types(scores.logprob_NS.dtype, torch.float32)
        logprob_NS = _inside(scores.logprob_NS, counted_NS, dtype)
        policy_NS, entropy_NS = (w_NS.to(dtype) for w_NS in weights)
        advantage_NS = _inside(batch.advantage_NS, counted_NS, dtype)
        if self.loss == "reinforce":
            token_loss_NS = -advantage_NS * logprob_NS
        elif self.loss == "cispo":
            ratio_NS = self.importance_ratio(logprob_NS, batch).detach()
            if self.clip_high is not None:
                ratio_NS = ratio_NS.clamp(max=self.clip_high)
            token_loss_NS = -ratio_NS * advantage_NS * logprob_NS
        elif self.loss == "sapo":
            ratio_NS = self.importance_ratio(logprob_NS, batch)
            heat_NS = torch.where(advantage_NS > 0, self.sapo_positive, self.sapo_negative)
            heat_NS = heat_NS.to(dtype)
            gate_NS = torch.sigmoid(heat_NS * (ratio_NS - 1)) * 4 / heat_NS
            token_loss_NS = -gate_NS * advantage_NS
        elif self.loss in CLIPPED:
            ratio_NS = self.importance_ratio(logprob_NS, batch)
            low = None if self.clip_low is None else 1 - self.clip_low
            high = None if self.clip_high is None else 1 + self.clip_high
            clipped_NS = ratio_NS if low is None and high is None else ratio_NS.clamp(low, high)
            if self.delta is not None:
                ratio_NS = ratio_NS.clamp(max=self.delta)
            token_loss_NS = -torch.min(ratio_NS * advantage_NS, clipped_NS * advantage_NS)
        else:
            raise _without_formula(self.loss, "weighted")
        if self.beta:
            kl_NS = self._kl(logprob_NS, batch, dtype)
            if self.kl_ratio:
                kl_NS = kl_NS * self.importance_ratio(logprob_NS, batch)
            token_loss_NS = token_loss_NS + self.beta * kl_NS
        loss = (policy_NS * token_loss_NS).sum()
        if self.entropy_coef:
            bonus_NS = entropy_NS * _inside(scores.entropy_NS, counted_NS, dtype)
            loss = loss - self.entropy_coef * bonus_NS.sum()
        return loss

    def importance_ratio(self, logprob_NS: Tensor, batch: UpdateBatch) -> Tensor:
        """r of the module docstring, by token, by sequence or of the whole rollout."""
        dtype = logprob_NS.dtype
        logprob_NS = _inside(logprob_NS, batch.counted_NS, dtype)
        if batch.old_logprob_NS is None:
            old_NS = logprob_NS.detach()
        else:
            old_NS = _inside(batch.old_logprob_NS, batch.counted_NS, dtype)
        logratio_NS = logprob_NS - old_NS
        if self.loss == "rloo":
            logratio_NS = logratio_NS.sum(1, keepdim=True).expand_as(logratio_NS)
        elif self.ratio == "sequence":
            tokens_N1 = batch.counted_NS.sum(1, keepdim=True).clamp_min(1).to(dtype)
            logratio_NS = (logratio_NS.sum(1, keepdim=True) / tokens_N1).expand_as(logratio_NS)
        return logratio_NS.exp()

    def _kl(self, logprob_NS: Tensor, batch: UpdateBatch, dtype: torch.dtype) -> Tensor:
        if batch.ref_logprob_NS is None:
            raise ValueError(
                f"beta is {self.beta} but the batch has no ref_logprob_NS: record the reference "
                "model's log-probs, or set Objective(beta=0)."
            )
        gap_NS = _inside(batch.ref_logprob_NS, batch.counted_NS, dtype) - logprob_NS
        if self.kl == "k1":
            return -gap_NS
        if self.kl == "k2":
            return gap_NS**2 / 2
        return gap_NS.exp() - gap_NS - 1


LOSS_SETTINGS = tuple(f.name for f in fields(Objective) if f.name not in ("kl", "divisor"))
"""Fields that training's settings decide: TRL has one kind of KL, and a divisor is of one batch."""


def objective_from(settings: Mapping[str, Any], *, divisor: float | None) -> Objective:
    """The loss of a training; a setting that is absent or None is at its default."""
    values = {name: settings.get(name) for name in LOSS_SETTINGS}
    return Objective(
        **{name: value for name, value in values.items() if value is not None}, divisor=divisor
    )


def token_coefficients(objective: Objective, scores: Scores, batch: UpdateBatch) -> Scores:
    """dL/dl_ik and dL/dh_ik: how the loss changes with each token's log-prob and entropy.

    Args:
        objective: The loss.
        scores: Of the update rollouts, at the policy in question.
        batch: Advantages and old log-probs.

    Returns:
        Coefficients in the shape of the scores.

    Examples:
        >>> from entropy_experiments.toy import BigramPolicy
        >>> policy = BigramPolicy()
        >>> batch = policy.update_batch(seed=1)
        >>> scores = policy.score(policy.params, batch.rollouts)
        >>> coefficients = token_coefficients(Objective(loss="reinforce"), scores, batch)
        >>> expected_NS = -batch.advantage_NS / len(batch.rollouts)  # of c = w_i, loss = -A l
        >>> inside_NS = batch.rollouts.response_NS
        >>> bool((coefficients.logprob_NS == expected_NS)[inside_NS].all())
        True
    """
    leaves = Scores(*(x_NS.detach().requires_grad_() for x_NS in scores))
    with torch.enable_grad():
        loss = objective(leaves, batch)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    # A loss without an entropy bonus does not read the entropies: their coefficient is 0.
    return Scores(
        *(
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(leaves, grads, strict=True)
        )
    )


def _microbatch_share(batch: UpdateBatch, tokens_N: Tensor) -> Tensor:
    """A mean of microbatch means: w_i over the weighted tokens of its microbatch."""
    if batch.microbatch_N is None:
        index_N = torch.zeros_like(batch.rollouts.prompt_N)
    else:
        _, index_N = torch.unique(batch.microbatch_N, return_inverse=True)
    count = int(index_N.max()) + 1
    weight_N = batch.rollouts.weight_N
    totals = torch.zeros(count, dtype=tokens_N.dtype, device=tokens_N.device)
    totals = totals.index_add(0, index_N, weight_N * tokens_N)
    # A microbatch without counted tokens contributes nothing, as in TRL.
    return weight_N / (count * totals.clamp_min(torch.finfo(totals.dtype).tiny)[index_N])


def _inside(x_NS: Tensor, response_NS: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(response_NS, x_NS.to(dtype), 0.0)


def _without_formula(loss: str, where: str) -> ValueError:
    return ValueError(
        f"Loss {loss!r} has a name (loss_names) and no formula in Objective.{where}; expected one "
        "for every name. Write it there."
    )
