"""Documents 000 and 002's `ProbeComponents`: the prediction as a product of two mean gradients.

    X = the gradient of the entropy on E          estimate.gradient
    Y = the optimizer's step of U, per unit rate  update.adamw: momentum and decay included
    bars_dot = X . Y          deltaH1 = learning_rate * bars_dot

`estimate.first_order` gives the same number with an interval; prefer it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from entropy_experiments.delta_entropy_is import state_of
from entropy_experiments.estimate.gradient import entropy_gradient
from entropy_experiments.estimate.ratio import estimand_of
from entropy_experiments.numerics.derivatives import dot
from entropy_experiments.types import OptimizerState, Policy, Rollouts, UpdateBatch
from entropy_experiments.types.estimate import Form
from entropy_experiments.update.adamw import compute_update_vector_adamw
from entropy_experiments.update.objective import Objective


class ProbeComponents:
    """Pure compute: E and U batches in, gradients and deltaH1 out. Nothing is sampled here."""

    def __init__(
        self,
        sequence_processor: Policy,
        *,
        objective: Objective | None = None,
        max_grad_norm: float | None = None,
        microbatch: int = 8,
        form: Form = "per_decision",
    ) -> None:
        """`form`: of the measurement whose derivative X is."""
        self.policy, self.objective = sequence_processor, objective or Objective()
        self.max_grad_norm, self.microbatch = max_grad_norm, microbatch
        self.form: Form = form

    def accumulate_sum_X(
        self, E_batch: Rollouts, mb_size_prompts: int | None = None
    ) -> tuple[dict[str, Tensor], int]:
        """(B_E times the entropy gradient by parameter, B_E), B_E the prompts of the batch."""
        estimand = estimand_of(
            self.policy,
            prompts="population",
            unit="token",
            form=self.form,
            entropy="rao_blackwell",
            horizon=None,
        )
        gradient = entropy_gradient(
            self.policy, E_batch, estimand=estimand, microbatch=mb_size_prompts or self.microbatch
        )
        prompts = len(E_batch.prompt_N.unique())
        return {name: prompts * value for name, value in gradient.items()}, prompts

    def accumulate_sum_Y(
        self,
        U_batch: UpdateBatch,
        optimizer: OptimizerState | torch.optim.Optimizer,
        mb_size_prompts: int | None = None,
    ) -> tuple[dict[str, Tensor], int, float]:
        """(B_U times the step per unit learning rate, B_U, the learning rate)."""
        direction, _, _ = compute_update_vector_adamw(
            self.policy,
            U_batch,
            self.objective,
            state_of(optimizer, self.policy),
            max_grad_norm=self.max_grad_norm,
            microbatch=mb_size_prompts or self.microbatch,
        )
        prompts = len(U_batch.rollouts.prompt_N.unique())
        total = {name: prompts * value for name, value in direction.total.items()}
        return total, prompts, direction.lr

    def compute_delta_h1_from_batches(
        self,
        E_batch: Rollouts,
        U_batch: UpdateBatch,
        optimizer: OptimizerState | torch.optim.Optimizer,
        *,
        mb_size_prompts: int | None = None,
    ) -> dict[str, Any]:
        """bars_dot, deltaH1, learning_rate, B_E and B_U."""
        sum_X, prompts_E = self.accumulate_sum_X(E_batch, mb_size_prompts)
        sum_Y, prompts_U, lr = self.accumulate_sum_Y(U_batch, optimizer, mb_size_prompts)
        bars_dot = dot(sum_X, sum_Y) / (prompts_E * prompts_U)
        return {
            "bars_dot": bars_dot,
            "deltaH1": lr * bars_dot,
            "learning_rate": lr,
            "B_E": prompts_E,
            "B_U": prompts_U,
        }
