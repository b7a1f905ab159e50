"""Intervals of a run on the embedded policy: a real one, with the heavy tails that it has.

`python -m benchmarks.coverage` does the same with 2,000 and 1,000 probes (docs/LOG.md).
"""

from __future__ import annotations

import pytest
from benchmarks.coverage import FORMS, coverage, draw_pool
from scipy import stats

pytestmark = pytest.mark.statistical

ROLLOUTS, SEED = 3200, 22
FALSE_ALARM = 1e-4
CONSERVATIVE = 0.98
"""Of heavy tails on both sides Student's t covers more than it says: of the per-decision difference
97.7 % were seen in 2,000 probes."""


@pytest.mark.slow
def test_intervals_hold_the_truth():
    """The binomial test against 95 %; wider than that only where tails are heavy on both sides."""
    pool = draw_pool(ROLLOUTS, SEED)
    for form in FORMS:
        for row in coverage(pool, 16, form):
            held = round(row["coverage"] * row["probes"])
            too_few = stats.binomtest(held, row["probes"], 0.95, alternative="less").pvalue
            too_many = stats.binomtest(
                held, row["probes"], CONSERVATIVE, alternative="greater"
            ).pvalue
            assert too_few > FALSE_ALARM, row
            assert too_many > FALSE_ALARM, row
            # Teeth: half as wide would be seen.
            if row["number"] == "measured":
                assert _held_by_half(pool, form, row["truth"]) < 0.85


def _held_by_half(pool, form, truth) -> float:
    """Share of probes whose interval, cut to half its width, holds the truth."""
    held = []
    for probe in pool.probes(16):
        found = probe.estimates(form)["measured"]
        low, high = found.interval
        held.append(abs(found.value - truth) <= (high - low) / 4)
    return sum(held) / len(held)
