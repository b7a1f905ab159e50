"""Modules that stand in two places of a model: their parameters stay the model's own.

Such are a layer that is used twice, a norm that two layers share, and peft's trainable tokens over
tied embeddings. torch's functional_call would leave a plain tensor in their slot, and the optimizer
would go on moving a parameter that is no longer in the model.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.func import functional_call

from entropy_experiments import first_order
from entropy_experiments.models.call_conditions import call_with
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.models.trials import UnsupportedModelError
from entropy_experiments.online.loop import LoopProbe
from entropy_experiments.types import Direction
from oracles.tiny_models import own_seed, tiny_model, tiny_rollouts

pytestmark = pytest.mark.invariant


def trainable_tokens():
    config = LoraConfig(
        r=2, target_modules=["q_proj"], trainable_token_indices=[3, 4, 5], task_type="CAUSAL_LM"
    )
    with own_seed(0):
        model = get_peft_model(tiny_model("llama", tie_word_embeddings=True), config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    return model


def shared_norm():
    model = tiny_model("llama")
    layers = model.model.layers
    layers[1].input_layernorm = layers[0].input_layernorm
    return model


def looped():
    model = tiny_model("llama")
    model.model.layers[1] = model.model.layers[0]
    return model


BUILT = {"trainable tokens": trainable_tokens, "a shared norm": shared_norm, "a loop": looped}


def slots(model):
    return {
        (id(module), key): value
        for module in model.modules()
        for key, value in module._parameters.items()
    }


def assert_its_own(model, before):
    after = slots(model)
    assert after.keys() == before.keys()
    for slot, value in before.items():
        assert after[slot] is value


@pytest.mark.parametrize("built", BUILT)
def test_every_parameter_is_the_models_own_afterwards(built):
    model = BUILT[built]()
    before = slots(model)
    try:
        policy = SequenceProcessor(model)
        rollouts = tiny_rollouts()
        policy.score_all(rollouts)
        v = {name: torch.ones_like(value) for name, value in policy.params.items()}
        first_order(policy, rollouts, Direction(parts={"gradient": v}, lr=1e-3), repackings=0)
    except UnsupportedModelError:
        assert built == "a loop"  # its cache is that of one layer
    assert_its_own(model, before)


@pytest.mark.parametrize("built", ["trainable tokens", "a shared norm"])
def test_training_is_the_same_with_the_probe(built):
    def trained(probed):
        model = BUILT[built]()
        params = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=3e-3)
        probe = None
        if probed:
            probe = LoopProbe(model, optimizer, evaluation=tiny_rollouts(), max_overhead=None)
        tokens_NS = torch.randint(3, 20, (4, 8), generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            model(input_ids=tokens_NS, labels=tokens_NS).loss.backward()
            if probe is not None:
                with probe.step():
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        assert probe is None or (probe.off is None and len(probe.rows) == 2)
        return [p.detach().clone() for p in params]

    for with_probe, without in zip(trained(True), trained(False), strict=True):
        assert torch.equal(with_probe, without)


def test_a_parameter_of_two_names_moves_in_both():
    """And torch's own way is still what it was when this was written."""
    layer = torch.nn.Linear(2, 2)
    model, x = torch.nn.Sequential(layer, layer), torch.ones(1, 2)
    before, other = slots(model), {"0.weight": torch.eye(2), "0.bias": torch.ones(2)}
    assert torch.equal(call_with(model, other, (x,), {}), torch.full((1, 2), 3.0))
    assert_its_own(model, before)
    functional_call(model, other, (x,))
    assert model[0].weight is not before[id(layer), "weight"]
