"""Document 004's `delta_entropy_approx`; the mathematics is in `estimate.first_order`.

The scaffold that the document describes is a whole estimator now: the derivative of exactly what
`delta_entropy_true` measures, with an interval, and the curvature where it is asked for.
"""

from __future__ import annotations

from typing import Any

from entropy_experiments.estimate.curvature import curvature
from entropy_experiments.estimate.first_order import first_order
from entropy_experiments.results import numbers
from entropy_experiments.types import Direction, Params, Policy, Rollouts

__all__ = ["DeltaEntropyApprox", "curvature", "first_order"]


class DeltaEntropyApprox:
    """Predicts eta times the slope of H along a direction, and optionally the next term."""

    def __init__(self, sequence_processor: Policy, *, microbatch: int = 8) -> None:
        self.policy, self.microbatch = sequence_processor, microbatch

    def compute_delta_h_approx(
        self,
        E_batch: Rollouts,
        v_named: Direction | Params,
        eta: float,
        *,
        quadratic: bool = False,
    ) -> dict[str, Any]:
        """delta_h1 (eta times the slope), the slope, and with `quadratic` delta_h2 as well."""
        direction = v_named
        if not isinstance(direction, Direction):
            direction = Direction(parts={"direction": direction}, lr=1.0)
        slope = first_order(self.policy, E_batch, direction, microbatch=self.microbatch)
        out = {"delta_h1": numbers(eta * slope), "slope": numbers(slope)}
        if quadratic:
            bend = curvature(self.policy, E_batch, direction, microbatch=self.microbatch)
            out["delta_h2"] = numbers(eta**2 / 2 * bend)
        return out
