"""Whether a second difference can be believed: the same curve at two widths, and its rounding.

Sums A, B of scores z(e) that bend along a direction do so themselves, with D their derivative:

    A'' = D D A [z', z'] + D A [z'']
    columns   A, B, A', B', A'', B''   |   A'', B'' of near   |   of far   |   D A, D B [rounding]

Two widths that disagree mean that the curve is no parabola over the stencil (it bends further, or
crosses a kink such as a switch of experts), or that rounding is all there is: not trusted. The
noise floor is the rounding of all rollouts, as if independent, or as it adds up, whichever is more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.numerics.derivatives import How, dual
from entropy_experiments.numerics.second_order import SecondOrder, stencil_step
from entropy_experiments.numerics.sums import point
from entropy_experiments.types import Direction, Estimate, Policy, Rollouts

COLUMNS = 12
WIDTHS_AGREE = 0.05
"""Of the value: `second` extrapolates from both, and is then right to about a tenth of that."""

Pair = tuple[Tensor, Tensor]
Sums = Callable[[Any], Pair]


@dataclass(frozen=True, kw_only=True)
class Stencil:
    """A curvature at two widths, and what rounding does to it."""

    width: float
    """Of the nearest points, in learning rates."""
    near: float
    far: float
    rounding: float

    def doubts(self, estimate: Estimate) -> tuple[str, ...]:
        """Against the value, or its standard error where that is larger: then it hides the gap."""
        gap = abs(self.near - self.far)
        if gap <= WIDTHS_AGREE * max(abs(estimate.value), estimate.stderr or 0.0):
            return ()
        return (
            f"the second difference is {self.near:.3g} at a width of {self.width:.3g} learning "
            f"rates and {self.far:.3g} at twice that, more than {WIDTHS_AGREE:.0%} apart",
        )


def direction_step(
    policy: Policy, direction: Direction, mode: How, width: float | None = None
) -> float:
    """How far the points of the second difference are apart, in units of the direction."""
    if width is not None and not width > 0:
        raise ValueError(
            f"width is {width}; expected a positive number of learning rates, or None."
        )
    if width is not None:
        return width * direction.lr
    return stencil_step(policy.params, direction.total, mode, direction.lr)


def stencil_columns(sums: Sums, orders: SecondOrder) -> Tensor:
    """[N, COLUMNS] of `sums(z) = (A, B)`; `orders` has z and its derivatives."""

    def along(z: Any, tangent: Any) -> tuple[Pair, Pair]:
        return dual(sums, (z,), (tangent,))

    z, first, second, near, far, rounding = orders
    (value, slope), (_, own) = dual(lambda z: along(z, first), (z,), (first,))
    bends = [along(z, order)[1] for order in (second, near, far)]
    curved = [a + b for bend in bends for a, b in zip(own, bend, strict=True)]
    return torch.stack([*value, *slope, *curved, *along(z, rounding)[1]], dim=1)


def curvature_of_ratio(
    a: Tensor, b: Tensor, da: Tensor, db: Tensor, dda: Tensor, ddb: Tensor
) -> Tensor:
    """Of A / B."""
    return dda / b - 2 * da * db / b**2 - a * ddb / b**2 + 2 * a * db**2 / b**3


def stencil_of(sums_NM: Tensor, rollouts: Rollouts, width: float) -> Stencil:
    def value(second: slice) -> float:
        return point(
            curvature_of_ratio, torch.cat([sums_NM[:, :4], sums_NM[:, second]], dim=1), rollouts
        )

    weight_N = rollouts.weight_N.to(sums_NM)
    top, bottom = (weight_N[:, None] * sums_NM[:, :2]).sum(0)
    share_N = weight_N * (sums_NM[:, 10] - top / bottom * sums_NM[:, 11]) / bottom
    return Stencil(
        width=width,
        near=value(slice(6, 8)),
        far=value(slice(8, 10)),
        rounding=max(float((share_N**2).sum()) ** 0.5, abs(float(share_N.sum()))),
    )


def doubted(estimate: Estimate, stencil: Stencil) -> Estimate:
    """The estimate with the stencil's doubts, and with the stencil among its diagnostics."""
    reasons = (*estimate.given_reasons, *stencil.doubts(estimate))
    diagnostics = {**estimate.diagnostics, "stencil": stencil}
    return replace(estimate, given_reasons=reasons, diagnostics=diagnostics)
