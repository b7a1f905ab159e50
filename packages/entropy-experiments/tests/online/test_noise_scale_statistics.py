"""Pure noise shows no signal, a planted signal is found, and intervals cover as they say.

Gradients are Gaussian with a known mean and covariance, in microbatches of different sizes.
Coverage is judged by an exact binomial test.
"""

import pytest
import torch
from scipy import stats

from entropy_experiments.online.noise_scale import NoiseScale
from tolerances import FALSE_ALARM

pytestmark = pytest.mark.statistical

DIMENSIONS, STEPS, REPLICATES = 40, 16, 150
SIZES = (1.0, 2.0, 3.0, 6.0)
SPREAD = torch.linspace(0.2, 2.0, DIMENSIONS, dtype=torch.float64)
NOISE = float((SPREAD**2).sum())
PLANTED = 0.3
"""Each component of G: a signal of 3.6 against a noise of 57 per sample."""


def replicate(mean, seed):
    """(estimate, the biased one: mean over steps of |mean gradient|^2, with its interval)."""
    generator = torch.Generator().manual_seed(seed)
    noise = NoiseScale({"w": torch.zeros(DIMENSIONS, dtype=torch.float64)})
    biased = []
    for _ in range(STEPS):
        total = torch.zeros(DIMENSIONS, dtype=torch.float64)
        for size in SIZES:
            z = torch.randn(DIMENSIONS, dtype=torch.float64, generator=generator)
            gradient = mean + SPREAD * z / size**0.5
            noise.add({"w": gradient}, size)
            total += size * gradient
        noise.close_step()
        biased.append(float((total / sum(SIZES)).square().sum()))
    return noise.estimate(), stats.t.interval(
        0.95, STEPS - 1, loc=torch.tensor(biased).mean(), scale=stats.sem(biased)
    )


@pytest.fixture(scope="module")
def both():
    """By the truth about |G|^2: the replicates of pure noise, and of a planted signal."""
    out = {}
    for component in (0.0, PLANTED):
        mean = torch.full((DIMENSIONS,), component, dtype=torch.float64)
        found = [replicate(mean, seed) for seed in range(REPLICATES)]
        out[DIMENSIONS * component**2] = found
    return out


@pytest.fixture(params=[0, 1], ids=["pure noise", "planted"])
def runs(request, both):
    return list(both.items())[request.param]


def as_said(hits):
    """Whether so many of REPLICATES may be 95 %; a little more is no fault."""
    test = stats.binomtest(hits, REPLICATES, 0.95, alternative="less")
    return test.pvalue > FALSE_ALARM


def test_intervals_cover(runs):
    signal, found = runs
    assert as_said(sum(one.signal.covers(signal) for one, _ in found))
    assert as_said(sum(one.noise.covers(NOISE) for one, _ in found))


def test_estimates_are_unbiased(runs):
    signal, found = runs
    for name, truth in (("signal", signal), ("noise", NOISE)):
        values = torch.tensor([getattr(one, name).value for one, _ in found])
        z = (float(values.mean()) - truth) / float(values.std() / REPLICATES**0.5)
        assert abs(z) < stats.norm.isf(FALSE_ALARM / 2)


def test_the_tests_have_teeth(runs):
    """|mean gradient|^2 in place of products of different microbatches covers nothing."""
    signal, found = runs
    hits = sum(low <= signal <= high for _, (low, high) in found)
    assert not as_said(hits)
    assert hits < 0.2 * REPLICATES


def test_pure_noise_has_no_critical_batch(both):
    found = both[0.0]
    unbounded = [one for one, _ in found if one.critical_batch is None]
    # Half of the 5 % that miss 0 do so above it.
    assert stats.binomtest(len(unbounded), REPLICATES, 0.975).pvalue > FALSE_ALARM
    for one in unbounded:
        assert one.why_not
        low, high = one.critical_batch_interval or (1.0, None)
        assert low > 0
        assert high is None
    told = [one.why_not[0] for one in unbounded if one.signal.interval[1] > 0]
    assert all("the noise scale has no upper bound" in why for why in told)


def test_a_planted_signal_gives_the_critical_batch(both):
    signal, found = list(both.items())[1]
    truth = NOISE / signal
    known = [one for one, _ in found if one.critical_batch is not None]
    assert len(known) > 0.95 * REPLICATES
    assert as_said(
        sum(
            (bar := one.critical_batch_interval) is not None
            and bar[0] <= truth
            and (bar[1] is None or truth <= bar[1])
            for one, _ in found
        )
    )
    typical = float(torch.tensor([one.critical_batch for one in known]).median())
    assert abs(typical / truth - 1) < 0.1
    widths = torch.tensor([one.critical_batch_interval[1] / one.critical_batch for one in known])
    assert float(widths.median()) < 2.5  # an interval that says something
