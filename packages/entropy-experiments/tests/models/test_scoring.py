"""`SequenceProcessor` against the obvious: one rollout at a time, unpadded, plain logits."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import pytest
import torch
from torch import Tensor

from entropy_experiments.estimate.ratio import check_repeatable
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.derivatives import dot, pullback, pushforward, shifted
from entropy_experiments.numerics.entropy import nucleus
from entropy_experiments.types import NucleusPolicy, Rollouts, Scores
from oracles.tiny_models import tiny_lora, tiny_model, tiny_rollouts
from tolerances import INVARIANT, SCORES_FP32, SLOPES_FP32

pytestmark = pytest.mark.naive

TIED = "ignore:Model has `tie_word_embeddings=True`:UserWarning"
MODELS = {
    "qwen2": lambda: tiny_model("qwen2"),
    "llama": lambda: tiny_model("llama"),
    "gpt2": lambda: tiny_model("gpt2"),
    "gemma2": lambda: tiny_model("gemma2"),
    "granite": lambda: tiny_model("granite"),
    "lora": lambda: tiny_lora("llama"),
    "lora on the head": lambda: tiny_lora("llama", target_modules=["q_proj", "lm_head"]),
    "saved head": lambda: tiny_lora("llama", modules_to_save=["lm_head"]),
    "dora": lambda: tiny_lora("qwen2", use_dora=True),
}
LOGITS_PATH = dict.fromkeys(MODELS, "head") | dict.fromkeys(
    ("gemma2", "granite", "lora on the head", "saved head"), "model"
)


@cache
def made(name: str) -> torch.nn.Module:
    """Shared by the tests that only read."""
    return MODELS[name]()


def uneven() -> Rollouts:
    return tiny_rollouts(prompts=(3, 40, 7), responses=(5, 9, 2))


def direction(policy: SequenceProcessor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(p.shape, generator=generator).to(p.dtype)
        for name, p in policy.params.items()
    }


def one_at_a_time(
    model: torch.nn.Module, rollouts: Rollouts, *, temperature: float = 1.0, top_p: float = 1.0
) -> Scores:
    logprob_NS = torch.zeros(rollouts.tokens_NS.shape, dtype=torch.float64)
    entropy_NS = torch.zeros_like(logprob_NS)
    for n in range(len(rollouts)):
        columns = rollouts.attention_NS[n].nonzero().flatten()
        tokens_S = rollouts.tokens_NS[n, columns]
        with torch.no_grad():
            logits_SV = model(input_ids=tokens_S[None]).logits[0].double() / temperature
        if top_p < 1:
            logits_SV = logits_SV.masked_fill(~nucleus(logits_SV, top_p), -torch.inf)
        logp_SV = logits_SV.log_softmax(-1)
        for s in range(1, len(columns)):
            if rollouts.response_NS[n, columns[s]]:
                logprob_NS[n, columns[s]] = logp_SV[s - 1, tokens_S[s]]
                entropy_NS[n, columns[s]] = torch.special.entr(logp_SV[s - 1].exp()).sum()
    return Scores(logprob_NS, entropy_NS)


def assert_scores(got: Scores, expected: Scores, tolerance: float) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        # Outside a top-p support both are -inf, which differs from nothing.
        gap = torch.where(ours == theirs, 0.0, ours.double() - theirs.double())
        assert float(gap.abs().max()) <= tolerance


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_one_prompt_at_a_time(name):
    """Prompt lengths 3 and 40, left-padded: the batch that once gave empty responses."""
    policy = SequenceProcessor(made(name))
    assert policy.logits_path == LOGITS_PATH[name]
    got = policy.score(policy.params, uneven())
    assert_scores(got, one_at_a_time(policy.model, uneven()), SCORES_FP32)
    assert bool((got.entropy_NS[uneven().response_NS] > 0).all())


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.3, 0.8)])
@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_the_law_is_the_policys_own(name, temperature, top_p):
    policy = SequenceProcessor(made(name), temperature=temperature, top_p=top_p)
    assert isinstance(policy, NucleusPolicy)
    expected = one_at_a_time(policy.model, uneven(), temperature=temperature, top_p=top_p)
    assert_scores(policy.score(policy.params, uneven()), expected, SCORES_FP32)


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_supports_change_only_where_the_law_does(name):
    policy, rollouts = SequenceProcessor(made(name), top_p=0.8), uneven()
    here_NS = policy.support(policy.params, rollouts)
    away_NS = policy.support(shifted(policy.params, direction(policy), 1e-2), rollouts)
    alone = [policy.support(policy.params, part) for _, _, part in rollouts.split(1)]
    assert torch.equal(here_NS != 0, rollouts.response_NS)
    assert 0 < int((here_NS != away_NS).sum()) < int(rollouts.response_NS.sum())
    assert sorted(int(x) for part in alone for x in part.flatten() if x) == sorted(
        int(x) for x in here_NS.flatten() if x
    )


def test_positions_matter_so_the_test_above_has_teeth():
    """Feeding left padding to the model as it is would be seen."""
    policy, rollouts = SequenceProcessor(made("gpt2")), uneven()
    naive = Rollouts(
        tokens_NS=rollouts.tokens_NS,
        attention_NS=torch.ones_like(rollouts.attention_NS),
        response_NS=rollouts.response_NS,
        prompt_N=rollouts.prompt_N,
    )
    right, wrong = policy.score(policy.params, rollouts), policy.score(policy.params, naive)
    assert float((right.entropy_NS - wrong.entropy_NS).abs().max()) > 0.01


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "lora", "saved head", "dora"])
def test_overrides_are_the_model_with_those_parameters(name):
    """Tied heads, biases and adapters included."""
    policy = SequenceProcessor(made(name))
    moved = shifted(policy.params, direction(policy), 0.05)
    changed = deepcopy(policy.model)
    changed.load_state_dict(moved, strict=False)
    # `load_state_dict` reaches tied weights through their first name alone.
    got = policy.score(moved, uneven())
    assert_scores(got, one_at_a_time(changed, uneven()), SCORES_FP32)
    before = policy.score(policy.params, uneven())
    assert float((got.entropy_NS - before.entropy_NS).abs().max()) > 0.01


@pytest.mark.parametrize("name", MODELS)
def test_every_way_to_differentiate_agrees(name):
    policy, rollouts = SequenceProcessor(made(name)), uneven()
    v = direction(policy)

    def score(params):
        return policy.score(params, rollouts)

    _, forward = pushforward(score, policy.params, v, how="jvp")
    _, twice = pushforward(score, policy.params, v, how="double_backward")
    for one, other in zip(forward, twice, strict=True):
        assert float((one - other).norm() / one.norm()) <= SLOPES_FP32
    _, gradient = pullback(lambda p: score(p).entropy_NS.sum(), policy.params)
    total = float(forward.entropy_NS.sum())
    assert abs(dot(gradient, v) - total) <= SLOPES_FP32 * float(forward.entropy_NS.abs().sum())


def test_many_parameter_settings_and_many_rollouts():
    policy, rollouts = SequenceProcessor(made("qwen2")), uneven()
    settings = [policy.params, shifted(policy.params, direction(policy), 0.01)]
    for params, scores in zip(settings, policy.score_many(settings, rollouts), strict=True):
        assert_scores(scores, policy.score(params, rollouts), 0.0)
    for microbatch in (1, 2, 8):
        whole = policy.score_all(rollouts, microbatch=microbatch)
        assert_scores(whole, policy.score(policy.params, rollouts), SCORES_FP32)
    assert not whole.entropy_NS.requires_grad


def test_padding_on_the_right_and_foreign_padding_tokens():
    policy, rollouts = SequenceProcessor(made("llama")), uneven()
    expected = policy.score(policy.params, rollouts)
    odd = rollouts.padded(4, 6, token=-100)
    got = policy.score(policy.params, odd)
    assert_scores(Scores(*(x_NS[:, 4:-6] for x_NS in got)), expected, INVARIANT)


@pytest.mark.parametrize("name", ["qwen2", "dora"])
def test_recomputation_changes_no_gradient(name):
    """Under other parameters than the model's, with the model in training mode and dropout on."""
    changes = {"lora_dropout": 0.5} if name == "dora" else {}
    model = tiny_lora("qwen2", use_dora=True, **changes) if name == "dora" else tiny_model("qwen2")
    model.config.attention_dropout = 0.5
    plain, saving = SequenceProcessor(model), SequenceProcessor(model, checkpointing=True)
    model.train()
    at = shifted(plain.params, direction(plain), 0.01)
    calls = []
    handle = model.get_submodule(
        "base_model.model.model.layers.0.mlp" if name == "dora" else "model.layers.0.mlp"
    ).register_forward_pre_hook(lambda *_: calls.append(1))
    found = []
    for policy in (plain, saving):
        assert not policy._without_effect  # tried once, before the first graph
        calls.clear()
        found.append(pullback(lambda p: policy.score(p, uneven()).entropy_NS.sum(), at)[1])
        assert len(calls) == (2 if policy is saving else 1)
    handle.remove()
    for key, grad in found[0].items():
        assert torch.equal(grad, found[1][key])
    assert all(module.training for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_call_leaves_no_trace():
    model = tiny_lora("qwen2", lora_dropout=0.3)
    model.train()
    model.get_submodule("base_model.model.model.layers.1").eval()
    policy = SequenceProcessor(model)

    def state():
        return (
            [module.training for module in model.modules()],
            [(n, p.requires_grad, p.grad, p.clone()) for n, p in model.named_parameters()],
            torch.get_rng_state(),
            torch.get_default_dtype(),
            model.config.use_cache,
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.is_grad_enabled(),
        )

    def same(a, b):
        if isinstance(a, Tensor):
            return torch.equal(a, b)
        if isinstance(a, list | tuple):
            return all(same(x, y) for x, y in zip(a, b, strict=True))
        return a == b

    before = state()
    first = policy.score(policy.params, uneven())
    pushforward(lambda p: policy.score(p, uneven()), policy.params, direction(policy))
    assert same(state(), before)
    # No dropout either: the same numbers again.
    assert_scores(policy.score(policy.params, uneven()), first, 0.0)


class Forgetful(torch.nn.Module):
    """Dropout that nobody can switch off."""

    def forward(self, x):
        return torch.nn.functional.dropout(x, 0.5, training=True)


def test_a_model_knows_whether_it_is_repeatable():
    """Dropout of modules is off in a call; what is on all the same is found, and refused."""
    model = tiny_lora("qwen2", lora_dropout=0.3)
    model.train()
    policy = SequenceProcessor(model)
    assert policy.repeatable
    model.get_submodule("base_model.model.model.layers.1.mlp").act_fn = Forgetful()
    assert not policy.repeatable
    with pytest.raises(ValueError, match="Is dropout on"):
        check_repeatable(policy, uneven())


def test_dora_trains_as_if_its_norms_were_constants():
    """The slope is that of the function; `as_trained` has peft's own gradient."""
    policy, rollouts = SequenceProcessor(made("dora")), uneven()
    _, exact = pullback(lambda p: policy.score(p, rollouts).entropy_NS.sum(), policy.params)
    _, trained = pullback(
        lambda p: policy.as_trained().score(p, rollouts).entropy_NS.sum(), policy.params
    )
    model = deepcopy(policy.model)
    total = torch.zeros(())
    for n in range(len(rollouts)):
        columns = rollouts.attention_NS[n].nonzero().flatten()
        logits_SV = model(input_ids=rollouts.tokens_NS[n, columns][None]).logits[0]
        h_S = torch.distributions.Categorical(logits=logits_SV).entropy()
        total = total + h_S[:-1][rollouts.response_NS[n, columns][1:]].sum()
    total.backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert p.grad is not None
            assert float((trained[name] - p.grad).norm() / p.grad.norm()) <= SLOPES_FP32
    gap = sum(float((exact[n] - g).norm() ** 2) for n, g in trained.items()) ** 0.5
    assert gap > 0.01 * dot(exact, exact) ** 0.5
    plain = SequenceProcessor(made("lora"))
    assert plain.as_trained() is plain


def test_bad_settings_are_refused():
    model = made("qwen2")
    with pytest.raises(ValueError, match=r"temperature is 0.*above 0"):
        SequenceProcessor(model, temperature=0)
    with pytest.raises(ValueError, match=r"top_p is 1.5"):
        SequenceProcessor(model, top_p=1.5)
    policy = SequenceProcessor(model)
    with pytest.raises(ValueError, match=r"unknown \['lora_A'\]"):
        policy.score({**policy.params, "lora_A": torch.ones(1)}, uneven())
    frozen = deepcopy(model).requires_grad_(False)
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has no trainable parameters"):
        SequenceProcessor(frozen)
