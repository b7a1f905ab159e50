"""Gradients of all rollouts at once against one pullback per rollout."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from entropy_experiments.models.linear_layer_gradients import (
    batched,
    gradients_by_rollout,
    linear_owners,
)
from entropy_experiments.models.precision import true_float64
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.derivatives import pullback
from entropy_experiments.numerics.rollout_gradients import rollout_gradients, weighted_sum
from entropy_experiments.types import BatchedPolicy, Rollouts, Scores
from oracles.tabular import TabularPolicy
from oracles.tiny_models import tiny_lora, tiny_model, tiny_rollouts
from tolerances import EXACT, SLOPES_FP32

pytestmark = pytest.mark.naive

MODELS = {
    "lora": lambda: tiny_lora("qwen2"),
    "lora with biases": lambda: tiny_lora("qwen2", bias="lora_only"),
    "lora everywhere": lambda: tiny_lora("llama", target_modules="all-linear"),
    "lora on the head": lambda: tiny_lora("llama", target_modules=["q_proj", "lm_head"]),
    "lora on conv1d": lambda: tiny_lora("gpt2", target_modules=["c_attn"], fan_in_fan_out=True),
    "saved head": lambda: tiny_lora("llama", modules_to_save=["lm_head"]),
    "saved norm": lambda: tiny_lora("llama", modules_to_save=["norm"]),
    "dora": lambda: tiny_lora("qwen2", use_dora=True),
    "tied": lambda: tiny_model("qwen2"),
    "untied": lambda: tiny_model("llama"),
    "head alone": lambda: only_the_head(tiny_model("llama")),
}
AT_ONCE = {
    "lora": True,
    "lora with biases": True,
    "lora everywhere": True,
    "lora on the head": True,
    "lora on conv1d": True,
    "saved head": True,
    "saved norm": False,
    "dora": False,
    "tied": False,
    "untied": False,
    # An nn.Linear, but its weight goes to the token scores without its forward.
    "head alone": False,
}


def only_the_head(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "lm_head.weight")
    return model


@cache
def policy_of(name: str, checkpointing: bool = False) -> SequenceProcessor:
    return SequenceProcessor(true_float64(MODELS[name]()), checkpointing=checkpointing)


def uneven() -> Rollouts:
    rollouts = tiny_rollouts(prompts=(3, 12, 7, 1), responses=(5, 6, 2, 4))
    rollouts.response_NS[1, 14] = False  # a tool's answer
    return rollouts


def worths_of(rollouts: Rollouts, count: int = 2) -> list[Scores]:
    """Nonzero in the padding too: nothing there may count."""
    generator = torch.Generator().manual_seed(5)

    def draw() -> Tensor:
        return torch.randn(rollouts.tokens_NS.shape, generator=generator, dtype=torch.float64)

    return [Scores(draw(), draw()) for _ in range(count)]


def alone(policy, rollouts: Rollouts, cotangent: Scores) -> list[dict[str, Tensor]]:
    """The whole microbatch's graph, with the worth of one rollout at a time."""
    found = []
    for n in range(len(rollouts)):
        only_NS = torch.zeros_like(rollouts.response_NS)
        only_NS[n] = rollouts.response_NS[n]
        _, grads = pullback(
            lambda p: weighted_sum(policy.score(p, rollouts), cotangent, only_NS), policy.params
        )
        found.append(grads)
    return found


def assert_same(stacked: dict[str, Tensor], rows: list[dict[str, Tensor]], tolerance: float):
    for name, values in stacked.items():
        expected = torch.stack([row[name] for row in rows])
        assert values.shape == expected.shape
        gap = float((values - expected).abs().max())
        assert gap <= tolerance * max(float(expected.abs().max()), 1e-3), (name, gap)


@pytest.mark.parametrize("name", MODELS)
def test_each_rollout_gets_its_own_gradient(name):
    policy, rollouts = policy_of(name), uneven()
    cotangents = worths_of(rollouts)
    found = rollout_gradients(policy, rollouts, cotangents)
    for stacked, cotangent in zip(found, cotangents, strict=True):
        assert set(stacked) == set(policy.params)
        assert_same(stacked, alone(policy, rollouts, cotangent), EXACT)
        _, whole = pullback(
            lambda p: weighted_sum(policy.score(p, rollouts), cotangent, rollouts.response_NS),
            policy.params,
        )
        assert_same({n: x.sum(0)[None] for n, x in stacked.items()}, [whole], EXACT)


@pytest.mark.parametrize("name", MODELS)
def test_at_once_where_that_is_right(name):
    policy, rollouts = policy_of(name), uneven()
    owners = linear_owners(policy.model, policy.params)
    found = None
    if owners is not None:
        found = batched(policy.score, owners, policy.params, rollouts, worths_of(rollouts))
    assert (found is not None) == AT_ONCE[name]


def test_at_once_means_one_forward():
    policy, rollouts = policy_of("lora"), uneven()
    calls = []
    block = policy.model.get_submodule("base_model.model.model.layers.0")
    handle = block.register_forward_pre_hook(lambda *_: calls.append(1))
    policy.gradients_by_rollout(policy.params, rollouts, worths_of(rollouts, 3))
    handle.remove()
    assert len(calls) == 1
    assert not any(module._forward_hooks for module in policy.model.modules())


def test_recomputed_layers_give_the_same():
    plain, saving = policy_of("lora"), policy_of("lora", checkpointing=True)
    rollouts = uneven()
    for one, other in zip(
        plain.gradients_by_rollout(plain.params, rollouts, worths_of(rollouts)),
        saving.gradients_by_rollout(saving.params, rollouts, worths_of(rollouts)),
        strict=True,
    ):
        for name, values in one.items():
            assert torch.allclose(values, other[name], rtol=0, atol=1e-13)


def test_other_parameters_than_the_models_own():
    policy, rollouts = policy_of("lora"), uneven()
    (cotangent,) = worths_of(rollouts, 1)
    moved = {name: value + 0.1 for name, value in policy.params.items()}
    (there,) = policy.gradients_by_rollout(moved, rollouts, [cotangent])
    (here,) = policy.gradients_by_rollout(policy.params, rollouts, [cotangent])
    name = next(iter(moved))
    _, expected = pullback(
        lambda p: weighted_sum(policy.score(p, rollouts), cotangent, rollouts.response_NS), moved
    )
    assert torch.allclose(there[name].sum(0), expected[name], rtol=0, atol=1e-10)
    assert not torch.allclose(there[name], here[name], rtol=0.01)


def test_fp32():
    policy, rollouts = SequenceProcessor(tiny_lora("qwen2")), uneven()
    cotangents = worths_of(rollouts)
    for stacked, cotangent in zip(
        rollout_gradients(policy, rollouts, cotangents), cotangents, strict=True
    ):
        assert_same(stacked, alone(policy, rollouts, cotangent), 1e-4)


class Twice(nn.Module):
    """A layer used twice in one forward, and its weight once behind its back."""

    def __init__(self, behind: float) -> None:
        super().__init__()
        self.embed, self.behind = nn.Embedding(50, 6), behind
        self.mix, self.head = nn.Linear(6, 6), nn.Linear(6, 50)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=torch.Generator().manual_seed(3))
        self.double().requires_grad_(False)
        self.mix.requires_grad_(True)

    def forward(self, tokens_NS: Tensor) -> Tensor:
        x_NSD = self.mix(torch.tanh(self.mix(self.embed(tokens_NS)))).cumsum(1)
        return self.head(x_NSD + self.behind * self.mix.weight.sum()).log_softmax(-1)


@pytest.mark.parametrize("behind", [0.0, 1e-3])
def test_a_layer_used_twice_and_a_weight_used_behind_its_back(behind):
    model, rollouts = Twice(behind), tiny_rollouts(prompts=(4, 4, 4), responses=(5, 5, 5))
    params = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

    def score(p, rollouts):
        logp_NSV = functional_call(model, p, (rollouts.tokens_NS,))
        l_NS = logp_NSV[:, :-1].gather(-1, rollouts.tokens_NS[:, 1:, None]).squeeze(-1)
        return Scores(*(nn.functional.pad(x_NS, (1, 0)) for x_NS in (l_NS, l_NS**2 / 2)))

    policy = type("Policy", (), {"score": staticmethod(score), "params": params})
    cotangents = worths_of(rollouts)
    owners = linear_owners(model, params)
    assert owners is not None
    assert (batched(score, owners, params, rollouts, cotangents) is None) == (behind > 0)
    found = gradients_by_rollout(score, model, params, rollouts, cotangents)
    for stacked, cotangent in zip(found, cotangents, strict=True):
        assert_same(stacked, alone(policy, rollouts, cotangent), EXACT)


def test_a_policy_that_offers_nothing_goes_one_by_one():
    policy = TabularPolicy.random(0)
    rollouts = Rollouts(
        tokens_NS=torch.tensor([[3, 1, 2, 0], [4, 4, 4, 1]]),
        attention_NS=torch.ones(2, 4, dtype=torch.bool),
        response_NS=torch.tensor([[False, True, True, True], [False, False, False, True]]),
        prompt_N=torch.arange(2),
    )
    assert not isinstance(policy, BatchedPolicy)
    assert isinstance(policy_of("lora"), BatchedPolicy)
    cotangents = worths_of(rollouts)
    for stacked, cotangent in zip(
        rollout_gradients(policy, rollouts, cotangents), cotangents, strict=True
    ):
        assert_same(stacked, alone(policy, rollouts, cotangent), EXACT)


def test_a_worth_of_another_shape_is_refused():
    policy, rollouts = policy_of("lora"), uneven()
    (cotangent,) = worths_of(rollouts, 1)
    short = Scores(cotangent.logprob_NS, cotangent.entropy_NS[:, 1:])
    for asked in (policy, TabularPolicy.random(0)):
        with pytest.raises(ValueError, match=r"of entropy_NS has shape \(4, 17\).*\(4, 18\)"):
            rollout_gradients(asked, rollouts, [short])


def test_a_parameter_without_effect_has_gradients_of_zero():
    """Part of a checkpoint that a decoder does not use, such as a vision tower."""
    model = tiny_lora("qwen2")
    policy, rollouts = SequenceProcessor(model), uneven()
    (expected,) = rollout_gradients(policy, rollouts, worths_of(rollouts, 1))
    model.base_model.model.unused = nn.Linear(2, 2)
    policy = SequenceProcessor(model)
    (found,) = rollout_gradients(policy, rollouts, worths_of(rollouts, 1))
    idle = set(found) - set(expected)
    assert len(idle) == 2
    assert not any(found[name].any() for name in idle)
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= SLOPES_FP32 * float(value.norm())
