"""The columns of a stencil against the plain way: the sums followed along scores that bend."""

import pytest
import torch
from torch.func import jvp

from entropy_experiments.estimate.ratio import payload, ratio_sums
from entropy_experiments.estimate.stencil import COLUMNS, stencil_columns
from entropy_experiments.numerics.second_order import SecondOrder
from entropy_experiments.types import Estimand, Scores
from oracles.cases import case
from tolerances import EXACT

pytestmark = pytest.mark.naive


@pytest.mark.parametrize("form", ["snis", "per_decision"])
def test_columns_are_those_of_the_bent_curve(form):
    rollouts = case("transformer", 0, 0.7).rollouts
    generator = torch.Generator().manual_seed(1)

    def draw():
        shape = rollouts.tokens_NS.shape
        return Scores(*(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in "lh"))

    orders = SecondOrder(*(draw() for _ in SecondOrder._fields))
    estimand = Estimand(form=form)

    def sums(scores):
        return ratio_sums(payload(scores, estimand), scores.logprob_NS, rollouts, estimand)

    def expanded(second):
        """A, B, A', B', A'', B'' of z + e z' + e^2 / 2 z'' by two nested derivatives in e."""

        def path(e):
            bent = (z + e * a + e**2 / 2 * b for z, a, b in zip(*orders[:2], second, strict=True))
            return sums(Scores(*bent))

        zero, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
        (value, first), (_, second_of) = jvp(lambda e: jvp(path, (e,), (one,)), (zero,), (one,))
        return torch.stack([*value, *first, *second_of], dim=1)

    found_NM = stencil_columns(sums, orders)
    plain = [expanded(second) for second in (orders.second, orders.near, orders.far)]
    rounded = Scores(*(a + b for a, b in zip(orders.second, orders.rounding, strict=True)))
    rounding_NM = (expanded(rounded) - plain[0])[:, 4:]
    wanted_NM = torch.cat([plain[0], plain[1][:, 4:], plain[2][:, 4:], rounding_NM], dim=1)
    assert found_NM.shape == (len(rollouts), COLUMNS)
    torch.testing.assert_close(found_NM, wanted_NM, rtol=EXACT, atol=EXACT)
    assert (found_NM[:, 4:].std(0) > 0.1).all()  # no column is empty
