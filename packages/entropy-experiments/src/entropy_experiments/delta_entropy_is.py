"""Document 002's `DeltaEntropyIS`: the step of a U batch, measured on an E batch by SNIS.

The step is rebuilt by `update.adamw` and measured by `estimate.measured`; neither the model nor the
optimizer is changed, so there is nothing to take a snapshot of and nothing to restore.
"""

from __future__ import annotations

from typing import Any

import torch

from entropy_experiments.estimate.level import entropy_level
from entropy_experiments.estimate.measured import measured
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.estimate.ratio import score_all
from entropy_experiments.results import numbers, weights_of
from entropy_experiments.types import OptimizerState, Policy, Rollouts, UpdateBatch
from entropy_experiments.types.estimate import Form
from entropy_experiments.update.adamw import compute_update_vector_adamw
from entropy_experiments.update.objective import Objective
from entropy_experiments.update.optimizer import read_state


class DeltaEntropyIS:
    """Ground truth of one policy: entropy before and after the step that a batch would make."""

    def __init__(
        self,
        sequence_processor: Policy,
        *,
        objective: Objective | None = None,
        max_grad_norm: float | None = None,
        microbatch: int = 8,
        form: Form = "snis",
    ) -> None:
        self.policy = sequence_processor
        self.form: Form = form
        self.objective = objective or Objective()
        self.max_grad_norm, self.microbatch = max_grad_norm, microbatch

    def entropy_change_two_batch(
        self,
        E_batch: Rollouts,
        U_batch: UpdateBatch,
        optimizer: OptimizerState | torch.optim.Optimizer,
        *,
        eta: float | None = None,
    ) -> dict[str, Any]:
        """H_orig, H_upd, deltaH_true and the weights behind them.

        The step has the optimizer's learning rate, or `eta`. A torch optimizer must hold the
        parameters of the processor's model.
        """
        direction, _, stats = compute_update_vector_adamw(
            self.policy,
            U_batch,
            self.objective,
            state_of(optimizer, self.policy),
            max_grad_norm=self.max_grad_norm,
            microbatch=self.microbatch,
        )
        options = EstimatorOptions(form=self.form, microbatch=self.microbatch)
        base = score_all(self.policy, self.policy.params, E_batch, microbatch=self.microbatch)
        level = entropy_level(self.policy, E_batch, options, base=base)
        step = direction.lr if eta is None else eta
        change = measured(self.policy, E_batch, direction, step, options, base=base)
        return {
            "H_orig": level.value,
            "H_upd": level.value + change.value,
            "deltaH_true": change.value,
            "learning_rate": step,
            **weights_of(change),
            "estimate": numbers(change),
            "update_norms": {**stats.part_norms, "grad_norm": stats.grad_norm},
        }


def state_of(optimizer: OptimizerState | torch.optim.Optimizer, policy: Policy) -> OptimizerState:
    """The optimizer's memory by parameter name."""
    if isinstance(optimizer, OptimizerState):
        return optimizer
    model: Any = getattr(policy, "model", None)
    if model is None:
        raise TypeError(
            f"Got a {type(optimizer).__name__} and a policy without a model; expected an "
            "OptimizerState. Make one: read_state(optimizer, {name: parameter})."
        )
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return read_state(optimizer, trainable)
