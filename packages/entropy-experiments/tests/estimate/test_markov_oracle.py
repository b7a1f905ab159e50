"""The Markov oracle's recursion against listing every response, where both can be done."""

from types import SimpleNamespace

import pytest
import torch

from oracles.enumeration import exact_taylor
from oracles.markov import MarkovPolicy
from tolerances import EXACT, assert_close

pytestmark = pytest.mark.exact


def listed(policy):
    """The same policy as the enumeration sees it: its prompts are the start tokens."""
    return SimpleNamespace(
        params=policy.params,
        temperature=policy.temperature,
        vocabulary=policy.vocabulary,
        horizon=policy.horizon,
        prompts=policy.vocabulary - 1,
        prompt_tokens=lambda prompt: [prompt + 1],
        logits=lambda params, tokens_NS, attention_NS: params["table"][tokens_NS],
    )


@pytest.mark.parametrize("unit", ["token", "sequence"])
@pytest.mark.parametrize("seed", range(5))
def test_recursion_equals_enumeration(seed, unit):
    policy = MarkovPolicy.random(seed, vocabulary=4, horizon=5, stop=0.2)
    policy.temperature = 0.8
    direction = policy.direction(seed)
    truth = exact_taylor(listed(policy), policy.params, direction.total, unit=unit)
    for got, want in zip(policy.exact_taylor(direction, unit=unit), truth):
        assert_close(got, want, EXACT)


def test_samples_follow_the_law():
    """Mean length and truncated share of 40,000 rollouts are what the recursion says."""
    policy = MarkovPolicy.random(0)
    rollouts = policy.draw(40_000, 1, torch.Generator().manual_seed(0))
    _, tokens = policy.exact(policy.params)
    length_N = rollouts.tokens_N.double()
    z = (length_N.mean() - tokens) / (length_N.std() / 200)
    assert abs(float(z)) < 4
    assert 50 < float(tokens) < 100
    truncated = float(rollouts.truncated_N.double().mean())
    assert abs(truncated - 0.1) < 0.01
