"""The embedding of a padding token that is also a real one: trained by nobody, moved all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from entropy_experiments.numerics.derivatives import dot, pullback, pushforward
from entropy_experiments.policy.precision import true_float64
from entropy_experiments.policy.scoring import SequenceProcessor
from oracles.tiny_models import tiny_model, tiny_rollouts

END = 5


@pytest.fixture(scope="module")
def made():
    model = true_float64(tiny_model("llama"))
    model.get_input_embeddings().padding_idx = END
    rollouts = tiny_rollouts(prompts=(4, 4), responses=(6, 3))
    tokens_NS = rollouts.tokens_NS.clone()
    tokens_NS[:, 3] = END
    tokens_NS[:, 6] = END
    return SequenceProcessor(model), replace(rollouts, tokens_NS=tokens_NS)


def row_of(policy, value):
    """A direction that moves the row of the padding token alone."""
    name = next(n for n, p in policy.model.named_parameters() if "embed_tokens" in n)
    v = {n: torch.zeros_like(p) for n, p in policy.params.items()}
    v[name][END] = value
    return name, v


def slope(policy, rollouts, v):
    _, found = pushforward(lambda p: policy.score(p, rollouts), policy.params, v)
    return float(found.entropy_NS.sum())


def gradient(policy, rollouts):
    return pullback(lambda p: policy.score(p, rollouts).entropy_NS.sum(), policy.params)[1]


def test_forward_and_reverse_agree_on_the_row(made):
    policy, rollouts = made
    name, v = row_of(policy, 1.0)
    forward, g = slope(policy, rollouts, v), gradient(policy, rollouts)
    assert abs(forward) > 1e-6
    assert dot(g, v) == pytest.approx(forward, rel=1e-9)
    assert float(g[name][END].abs().max()) > 0


def test_training_takes_no_gradient_of_it_in_either_mode(made):
    policy, rollouts = made
    trained = policy.as_trained()
    assert trained is not policy
    name, v = row_of(policy, 1.0)
    ours, full = gradient(trained, rollouts), gradient(policy, rollouts)
    assert float(ours[name][END].abs().max()) == 0
    assert slope(trained, rollouts, v) == 0
    others = torch.arange(len(full[name])) != END
    assert torch.allclose(ours[name][others], full[name][others], rtol=1e-9, atol=1e-12)
    # As torch's own backward has it, through the tied head too if there is one.
    model = policy.model
    model.zero_grad()
    found = trained.score(dict(model.named_parameters()), rollouts)
    found.entropy_NS.sum().backward()
    own = model.get_parameter(name).grad
    assert torch.allclose(own, ours[name], rtol=1e-9, atol=1e-12)
    model.zero_grad()


def test_the_module_is_as_it_was(made):
    policy, rollouts = made
    policy.score(policy.params, rollouts)
    embeddings = policy.model.get_input_embeddings()
    assert embeddings.padding_idx == END
    assert "forward" not in vars(embeddings)
