"""Second derivatives along a direction: five points, two widths, and what rounding leaves.

    near = D(h),  far = D(2h),  second = (4 near - far) / 3

D(h) is (f'(h) - f'(-h)) / 2h of exact first derivatives, or (f(h) - 2 f(0) + f(-h)) / h^2 of plain
values (`central`). `second` is right to the fourth order in h; how far `near` and `far` are apart
says whether the curve is a parabola over the stencil at all. The fourth difference of the five
points holds nothing but rounding (and orders that a narrow stencil does not see); scaled to
`second`, it is `rounding`.

The stencil is as wide as the step it speaks of: a few learning rates. A width chosen from the
parameters' size alone was 55 to 108 learning rates on full fine-tunes in fp32, and 1.9 times off.

Nesting torch's transforms instead would be exact in theory and silently wrong in practice: a jvp
of a jvp drops terms inside every custom Function, and native layer_norm is wrong at the third order
that forward over double_backward needs (torch 2.13; `tests/numerics` holds both facts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from entropy_experiments.numerics.derivatives import How, norm, pushforward, shifted
from entropy_experiments.types import Params

POINTS = (-2, -1, 1, 2)
NEAREST: dict[How, float] = {"jvp": 2.0, "double_backward": 2.0, "central": 8.0}
"""Distance of the nearest points in learning rates. Differences of plain values lose twice as many
digits to rounding, and need room."""
ROUNDING: dict[How, float] = {"jvp": 2.0**10, "double_backward": 2.0**10, "central": 2.0**13}
"""No narrower than this many roundings of theta: the points would be elsewhere than they should."""
BALANCE: dict[How, float] = {"jvp": 1 / 5, "double_backward": 1 / 5, "central": 1 / 6}
"""And no wider than where rounding and truncation balance: eps to this power, of theta's size."""
BALANCE_SCALE = 0.15
"""Networks bend on a shorter scale than their parameters' norm: measured on the oracles."""
SPREAD_JVP = (130 / 70) ** 0.5 / 12
SPREAD_CENTRAL = (1414 / 70) ** 0.5 / 12
"""Of `second` by the fourth difference, if the five points round independently: norms of their
weights, (1, 8, 0, 8, 1) / 12 or (1, 16, 30, 16, 1) / 12 over (1, 4, 6, 4, 1)."""


class SecondOrder(NamedTuple):
    """Each with the structure of f's own tensors."""

    value: Any
    first: Any
    second: Any
    near: Any
    far: Any
    rounding: Any


def stencil_step(params: Params, v: Params, how: How, lr: float | None) -> float:
    """h: a few learning rates, within what rounding allows. Without one: the widest of those."""
    size = norm(v)
    if size == 0:
        return lr or 1.0
    eps = max(torch.finfo(value.dtype).eps for value in params.values())
    unit = max(norm(params), 1.0) / size
    widest = BALANCE_SCALE * eps ** BALANCE[how] * unit
    if lr is None:
        return widest
    return min(widest, max(NEAREST[how] * lr, ROUNDING[how] * eps * unit))


def pushforward2(
    f: Callable[[Params], Any], params: Params, v: Params, *, how: How, step: float
) -> SecondOrder:
    """f, D_v f and D_v D_v f, the last from points `step` and twice that away."""
    h = step
    if how == "central":
        with torch.no_grad():
            here, *points = (f(shifted(params, v, k * h)) for k in (0, *POINTS))
        first = _mapped(lambda a, b, c, d: (8 * (c - b) - (d - a)) / (12 * h), *points)
        near, far = (
            _mapped(lambda a, b, o, w=w: (a + b - 2 * o) / w**2, left, right, here)
            for w, (left, right) in _pairs(points, h)
        )
        centre, spread = here, SPREAD_CENTRAL / h**2
    else:
        here, first, *points = _slopes(f, params, v, how, h)
        near, far = (
            _mapped(lambda a, b, w=w: (b - a) / (2 * w), left, right)
            for w, (left, right) in _pairs(points, h)
        )
        centre, spread = first, SPREAD_JVP / h
    a, b, c, d = points
    return SecondOrder(
        value=here,
        first=first,
        second=_mapped(lambda x, y: (4 * x - y) / 3, near, far),
        near=near,
        far=far,
        rounding=_mapped(
            lambda a, b, o, c, d: spread * (a - 4 * b + 6 * o - 4 * c + d), a, b, centre, c, d
        ),
    )


def _slopes(
    f: Callable[[Params], Any], params: Params, v: Params, how: How, h: float
) -> Iterator[Any]:
    """f and f' at theta, then f' at the other points."""
    yield from pushforward(f, params, v, how=how)
    for k in POINTS:
        yield pushforward(f, shifted(params, v, k * h), v, how=how)[1]


def _pairs(points: list[Any], h: float) -> list[tuple[float, tuple[Any, Any]]]:
    """(width, points at minus and plus that width), the nearest first."""
    a, b, c, d = points
    return [(h, (b, c)), (2 * h, (a, d))]


def _mapped(of: Callable[..., Any], *trees: Any) -> Any:
    """Differences are taken in fp64: rounding of the points is theirs, not ours."""
    return tree_map(lambda *leaves: of(*(leaf.double() for leaf in leaves)), *trees)
