"""The loss of a counterfactual step: a pure function of scores, as an Objective is.

    L' = sum_ik m_ik [ c_ik (loss_ik + coef_ik |l_ik - l_old_ik|) - entropy_coef e_ik h_ik ]

m multiplies a token's whole loss (dropped: 0); loss_ik is that of the changed Objective. The
weights c and e keep the normalisers of the *recorded* batch, and advantages are the recorded ones:
"frozen". Its token coefficients are autograd on two small arrays, its gradient one backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from entropy_experiments.types import Scores, UpdateBatch
from entropy_experiments.types.rollouts import FULL_REWARD
from entropy_experiments.update.objective import Objective, TokenWeights

ROUNDING = 1e-5
"""Nats: log-probs of the same policy recorded while sampling and recomputed differ by less."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recorded:
    """The step that was made: what every selection looks at."""

    objective: Objective
    scores: Scores
    batch: UpdateBatch
    lr: float
    influence_NS: Tensor | None = None

    def column(self, name: str) -> Tensor:
        """A column of the token table, as [N, S]."""
        rollouts = self.batch.rollouts
        shape, device = rollouts.tokens_NS.shape, rollouts.tokens_NS.device
        if name == "probability":
            return self.scores.logprob_NS.exp()
        if name in ("logprob", "entropy"):
            return getattr(self.scores, f"{name}_NS")
        if name == "k":
            return rollouts.response_NS.cumsum(1) - 1
        if name == "position":
            return torch.arange(shape[1], device=device).expand(shape)
        if name == "influence":
            if self.influence_NS is None:
                raise ValueError(
                    "A selector reads 'influence', which is not known here. Give the token table "
                    "(repredict does), or select by another column."
                )
            return self.influence_NS
        if name == "advantage":
            return self.batch.advantage_NS
        reward_N = self.batch.reward_N
        if name in ("reward", "correct") and reward_N is None:
            raise ValueError(
                "A selector reads 'reward', and the update batch has no reward_N. Record rewards "
                "with the batch, or select by advantage."
            )
        if name == "correct" and reward_N is not None and self.batch.correct_N is None:
            raise ValueError(
                "A selector reads 'correct', and no reward of the update batch is a full one: the "
                f"highest is {float(reward_N.nan_to_num(-torch.inf).max()):.4g}, "
                f"expected {FULL_REWARD:g} or more. Select by reward instead, such as reward>0.5."
            )
        per_rollout = {
            "reward": reward_N,
            "correct": self.batch.correct_N,
            "prompt": rollouts.prompt_N,
            "rollout": torch.arange(len(rollouts), device=device),
        }[name]
        assert per_rollout is not None
        return per_rollout[:, None].expand(shape)

    @property
    def log_ratio_NS(self) -> Tensor:
        """l - l_old on counted tokens; zero where the batch has no old log-probs."""
        old_NS, logprob_NS = self.batch.old_logprob_NS, self.scores.logprob_NS
        if old_NS is None:
            return torch.zeros_like(logprob_NS)
        return torch.where(self.batch.counted_NS, logprob_NS - old_NS.to(logprob_NS), 0.0)

    @property
    def ratios_are_one(self) -> bool:
        return float(self.log_ratio_NS.abs().max()) <= ROUNDING


@dataclass(frozen=True, kw_only=True, eq=False)
class Counterfactual:
    """A loss that might have been; `loss` is a function of scores, as an Objective is."""

    recorded: Recorded
    objective: Objective
    advantage_NS: Tensor
    """Recorded advantages, zero where Clip-Cov takes the policy loss away."""
    weight_NS: Tensor
    penalty_NS: Tensor | None
    """coef_ik of the module docstring."""
    lr: float
    notes: tuple[str, ...] = ()

    def loss(
        self, scores: Scores, rows_N: Tensor | None = None, columns: slice = slice(None)
    ) -> Tensor:
        """L' of the whole batch, or of some rows and columns under the whole's weights."""
        batch = self.recorded.batch
        rows_N = torch.arange(len(batch.rollouts)) if rows_N is None else rows_N
        c_NS, e_NS = self.objective.token_weights(batch)
        weights = TokenWeights(c_NS * self.weight_NS, e_NS * self.weight_NS).take(rows_N, columns)
        part = replace(batch, advantage_NS=self.advantage_NS).take(rows_N, columns)
        value = self.objective.weighted(scores, part, weights)
        if self.penalty_NS is not None and part.old_logprob_NS is not None:
            gap_NS = scores.logprob_NS - part.old_logprob_NS.to(scores.logprob_NS)
            cotangent_NS = (weights.policy_NS * self.penalty_NS[rows_N, columns]).to(gap_NS)
            value = value + torch.where(cotangent_NS != 0, cotangent_NS * gap_NS.abs(), 0.0).sum()
        return value

    @property
    def coefficient(self) -> Scores:
        """dL'/dl_ik and dL'/dh_ik at the recorded scores."""
        leaves = Scores(*(x_NS.detach().requires_grad_() for x_NS in self.recorded.scores))
        with torch.enable_grad():
            value = self.loss(leaves)
        grads = torch.autograd.grad(value, leaves, allow_unused=True)
        # Without an entropy bonus the loss does not read the entropies.
        return Scores(
            *(
                torch.zeros_like(leaf) if grad is None else grad
                for leaf, grad in zip(leaves, grads, strict=True)
            )
        )

    def noting(self, *notes: str) -> Counterfactual:
        return replace(self, notes=(*self.notes, *notes))

    def times(self, factor_NS: Tensor) -> Counterfactual:
        return replace(self, weight_NS=self.weight_NS * factor_NS)
