"""`first_order_by_part` against one `first_order` per part, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from entropy_experiments import first_order, first_order_by_part
from entropy_experiments.estimate.first_order import scores_along
from entropy_experiments.numerics.derivatives import central_step, shifted
from entropy_experiments.types import Rollouts, Scores
from oracles.cases import random_direction
from oracles.enumeration import all_rollouts
from oracles.transformer import TransformerPolicy
from tolerances import INVARIANT, assert_close

pytestmark = pytest.mark.naive

MODES = ("jvp", "double_backward", "central", "reverse")


class Counting(TransformerPolicy):
    scored = 0

    def score(self, params: Any, rollouts: Rollouts) -> Scores:
        self.scored += len(rollouts)
        return super().score(params, rollouts)


@pytest.mark.parametrize("form", ["matched", "to_go"])
@pytest.mark.parametrize("mode", MODES)
def test_every_part_is_its_own_slope(mode, form):
    policy: Any = Counting(4)
    rollouts, direction = all_rollouts(policy), random_direction(policy, 4)
    options: dict[str, Any] = {"mode": mode, "form": form, "microbatch": 16, "repackings": 0}
    policy.scored = 0
    found = first_order_by_part(policy, rollouts, direction, **options)
    together, policy.scored = policy.scored, 0
    whole = first_order(policy, rollouts, direction, **options)
    once = policy.scored
    for name, estimate in {"total": found.total, **found.lines}.items():
        single = whole
        if name != "total":
            single = first_order(policy, rollouts, direction.only(name), **options)
        assert_close(estimate.value, single.value, INVARIANT)
        assert (estimate.stderr is None) == (single.stderr is None)
        assert_close(estimate.stderr or 0.0, single.stderr or 0.0, INVARIANT)
        for term in ("direct", "state"):
            one, other = (e.diagnostics[term] for e in (estimate, single))
            assert_close(getattr(one, "value", one), getattr(other, "value", other), INVARIANT)
    # One forward serves all parts, where forwards are not the derivative itself.
    if mode in ("jvp", "reverse"):
        assert together == once
    if mode == "central":
        assert together - once == 2 * len(direction.parts) * len(rollouts)


def test_central_directions_share_the_scores_at_theta():
    """One pass at theta, two for each direction; and the bits of a difference by itself."""
    policy: Any = Counting(4)
    rollouts, direction = all_rollouts(policy), random_direction(policy, 4)
    many = [direction.total, *direction.parts.values()]
    policy.scored = 0
    here, slopes = scores_along(policy, rollouts, many, mode="central", microbatch=16)
    assert policy.scored == (1 + 2 * len(many)) * len(rollouts)
    expected = [torch.zeros_like(x_NS) for scores in (here, *slopes) for x_NS in scores]
    for rows_N, columns, part in rollouts.split(16, policy):
        for k, v in enumerate(many):
            step = central_step(policy.params, v, power=1 / 3)
            theta, plus, minus = (
                policy.score(shifted(policy.params, v, c * step), part) for c in (0, 1, -1)
            )
            for i, (x_NS, a_NS, b_NS) in enumerate(zip(theta, plus, minus, strict=True)):
                expected[i][rows_N, columns] = x_NS
                expected[2 * (k + 1) + i][rows_N, columns] = (a_NS - b_NS) / (2 * step)
    found = [x_NS for scores in (here, *slopes) for x_NS in scores]
    for got_NS, want_NS in zip(found, expected, strict=True):
        assert torch.equal(got_NS, want_NS)
        assert want_NS.any()


def test_a_policy_that_ignores_its_parameters_is_refused():
    policy: Any = TransformerPolicy(4)
    own, rollouts = dict(policy.params), all_rollouts(policy)
    score = policy.score
    policy.score = lambda params, part: score(own, part)
    with pytest.raises(ValueError, match="do not change along the direction at all"):
        first_order_by_part(policy, rollouts, random_direction(policy, 4), repackings=0)
