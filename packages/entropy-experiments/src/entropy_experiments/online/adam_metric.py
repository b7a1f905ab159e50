"""The metric in which Adam's step is steepest: its preconditioner, read from a live optimizer.

    P = (lr_group / lr) / (sqrt(v_hat) + eps),        x' P x in place of |x|^2

Only the moments of past steps are in it, so P and the next gradient's noise are independent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def adam_preconditioner(
    optimizer: Any, params: Mapping[str, Tensor]
) -> Mapping[str, Tensor] | None:
    """Of torch's Adam or AdamW as it is now; None before its first step.

    Made of the optimizer's own second moments, a tensor at a time when asked: nothing is copied.
    """
    return None if not any(optimizer.state.values()) else _AdamPreconditioner(optimizer, params)


class _AdamPreconditioner(Mapping[str, Tensor]):
    def __init__(self, optimizer: Any, params: Mapping[str, Tensor]) -> None:
        self._params, self._state = dict(params), optimizer.state
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        # Of all groups 0, as in the first step of a warm-up: then none is favoured.
        self._base = next((float(g["lr"]) for g in optimizer.param_groups if g["lr"]), None)
        self._group: dict[str, Mapping[str, Any]] = {}
        self._step: dict[str, float] = {}
        for name, p in params.items():
            group, state = groups.get(id(p)), self._state.get(p) or {}
            if group is None or "betas" not in group:
                raise ValueError(
                    f"{name!r} is not in an Adam group of the optimizer; expected every parameter "
                    "in one. Leave the preconditioner out for the raw noise scale."
                )
            if "exp_avg_sq" not in state:
                raise ValueError(
                    f"The optimizer has no exp_avg_sq for {name!r}; it has {sorted(state)}. "
                    "Expected torch's Adam or AdamW, with state for every parameter."
                )
            self._group[name], self._step[name] = group, float(state["step"])

    def __getitem__(self, name: str) -> Tensor:
        group, state = self._group[name], self._state[self._params[name]]
        step = self._step[name]
        if float(state["step"]) != step:
            raise ValueError(
                f"The optimizer has stepped since open_step (step {step:.0f} then, "
                f"{float(state['step']):.0f} now): its preconditioner has seen this gradient. Call "
                "close_step before optimizer.step()."
            )
        moment = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
        spread = (moment.detach() / (1 - group["betas"][1] ** step)).sqrt_().add_(group["eps"])
        share = 1.0 if self._base is None else float(group["lr"]) / self._base
        return spread.reciprocal_().mul_(share)

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)
