"""Intervals of pass rates cover, where responses to a prompt are alike and passes are rare.

The chance to pass differs from prompt to prompt (beta), so the responses of a prompt are worth less
than as many prompts. Coverage is judged by an exact binomial test.
"""

from math import prod

import pytest
import torch
from scipy import stats

from entropy_experiments.estimate.shares import pass_at_k, share_by_prompt
from entropy_experiments.types import Estimand
from tolerances import FALSE_ALARM

pytestmark = pytest.mark.statistical

REWARD = Estimand(quantity="reward", unit="sequence")
PROMPTS, SAMPLES, REPLICATES = 40, 8, 300
SHORT = 0.02
"""How far below 95 % a coverage may be: these intervals are good, not exact."""
BETAS = [(0.3, 0.7), (0.1, 1.9), (4.0, 1.0)]


def drawn(beta, seed):
    chance_P = torch.tensor(stats.beta(*beta).rvs(PROMPTS, random_state=seed))
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(PROMPTS, SAMPLES, dtype=torch.float64, generator=generator)
    return (draws < chance_P[:, None]).double()


def covers_enough(hits):
    test = stats.binomtest(hits, REPLICATES, 0.95 - SHORT, alternative="less")
    return test.pvalue > FALSE_ALARM


@pytest.mark.parametrize("beta", BETAS, ids=str)
@pytest.mark.parametrize("k", [1, 4])
def test_intervals_cover(beta, k):
    a, b = beta
    # E (1 - p)^k of a beta, in closed form: integrating it numerically fails at p = 0.
    truth = 1 - prod((b + i) / (a + b + i) for i in range(k))
    hits = naive = 0
    for seed in range(REPLICATES):
        passed_PG = drawn(beta, seed)
        passes = [int(c) for c in passed_PG.sum(1).tolist()]
        share_P = pass_at_k(passes, SAMPLES, k)
        count = float(PROMPTS * SAMPLES)
        hits += share_by_prompt(share_P, REWARD, trials=count / k).covers(truth)
        if k > 1:
            continue
        rate = float(passed_PG.mean())
        bar = stats.binomtest(round(rate * count), int(count)).proportion_ci(method="wilson")
        naive += bar.low <= truth <= bar.high
    assert covers_enough(hits)
    if k == 1 and beta != (4.0, 1.0):
        assert not covers_enough(naive)  # teeth: responses counted as if they were prompts
