"""The embedding of a padding token that is also a real one: not trained, and moved all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from entropy_experiments.models.precision import true_float64
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.derivatives import dot, pullback, pushforward
from oracles.tiny_models import tiny_lora, tiny_model, tiny_rollouts

pytestmark = pytest.mark.naive

END = 5


ADAPTERS = {
    "lora on the table": {"target_modules": ["q_proj", "embed_tokens"]},
    "token indices": {"trainable_token_indices": [END, 7]},
}


@pytest.fixture(scope="module", params=["llama", "qwen2", *ADAPTERS])
def made(request):
    if request.param in ADAPTERS:
        model = tiny_lora("llama", **ADAPTERS[request.param])
    else:
        model = tiny_model(request.param)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = END
    rollouts = tiny_rollouts(prompts=(4, 4), responses=(6, 3))
    tokens_NS = rollouts.tokens_NS.clone()
    tokens_NS[:, 3] = END
    tokens_NS[:, 6] = END
    return SequenceProcessor(true_float64(model)), replace(rollouts, tokens_NS=tokens_NS)


def direction(policy):
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in policy.params.items()
    }


def slope(policy, rollouts, v):
    _, found = pushforward(lambda p: policy.score(p, rollouts), policy.params, v)
    return float(found.entropy_NS.sum())


def gradient(policy, rollouts):
    return pullback(lambda p: policy.score(p, rollouts).entropy_NS.sum(), policy.params)[1]


def test_forward_reverse_and_differences_agree(made):
    policy, rollouts = made
    v = direction(policy)
    forward = slope(policy, rollouts, v)
    _, away = pushforward(lambda p: policy.score(p, rollouts), policy.params, v, how="central")
    assert dot(gradient(policy, rollouts), v) == pytest.approx(forward, rel=1e-9)
    assert float(away.entropy_NS.sum()) == pytest.approx(forward, rel=1e-5)


def test_training_takes_no_gradient_of_the_row_in_either_mode(made):
    policy, rollouts = made
    trained, v = policy.as_trained(), direction(policy)
    assert trained is not policy
    forward, g = slope(trained, rollouts, v), gradient(trained, rollouts)
    assert dot(g, v) == pytest.approx(forward, rel=1e-9)
    assert forward != pytest.approx(slope(policy, rollouts, v), rel=1e-3)  # the row matters


def test_training_s_gradient_is_the_models_own(made):
    """Through the model as it is, one rollout at a time: torch's and peft's own backward."""
    policy, rollouts = made
    ours, model = gradient(policy.as_trained(), rollouts), policy.model
    model.zero_grad()
    for n in range(len(rollouts)):
        columns = rollouts.attention_NS[n].nonzero().flatten()
        logits_SV = model(input_ids=rollouts.tokens_NS[n, columns][None]).logits[0]
        h_S = torch.distributions.Categorical(logits=logits_SV).entropy()
        h_S[:-1][rollouts.response_NS[n, columns][1:]].sum().backward()
    own = dict(model.named_parameters())
    for name, grad in ours.items():
        expected = own[name].grad if own[name].grad is not None else torch.zeros_like(grad)
        assert torch.allclose(grad, expected, rtol=1e-7, atol=1e-11)
    model.zero_grad()


def test_frozen_tables_need_no_second_policy():
    policy = SequenceProcessor(tiny_lora("llama"))
    assert policy.as_trained() is policy
