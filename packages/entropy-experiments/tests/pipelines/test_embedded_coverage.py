"""Intervals of a run on the embedded policy: a real one, with the heavy tails that it has.

`python -m benchmarks.coverage` does the same with 2,000 and 1,000 probes (LOG.md).
"""

from __future__ import annotations

import pytest
from benchmarks.coverage import FORMS, coverage, draw_pool
from scipy import stats

pytestmark = pytest.mark.statistical

ROLLOUTS, SEED = 3200, 22
FALSE_ALARM = 1e-4
WIDEST = 1.3
"""Of t(n - 1) times the true spread, as for the Markov policy. Coverage of 200 probes cannot show
an interval that is too wide: of one that covers 98 %, all 200 hold the truth once in 57 times."""


@pytest.mark.slow
def test_intervals_hold_the_truth():
    """The binomial test against 95 %, and not by being wide."""
    pool = draw_pool(ROLLOUTS, SEED)
    for form in FORMS:
        for row in coverage(pool, 16, form):
            held = round(row["coverage"] * row["probes"])
            too_few = stats.binomtest(held, row["probes"], 0.95, alternative="less").pvalue
            assert too_few > FALSE_ALARM, row
            assert row["width"] < WIDEST, row
            # Teeth: half as wide would be seen, and so would twice as wide.
            if row["number"] == "level":
                assert 2 * row["width"] > WIDEST, row
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
