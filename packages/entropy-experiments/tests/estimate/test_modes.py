"""Differentiation that always works: which way a model has, and what each says of the same slope.

Mixtures of experts, BLOOM, RecurrentGemma and a state space: forward mode through experts one after
another, or two backward passes; differences led by one gradient, and doubted where they disagree.
"""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from entropy_experiments.estimate import central as central_module
from entropy_experiments.estimate import modes as modes_module
from entropy_experiments.estimate.curvature import curvature
from entropy_experiments.estimate.first_order import first_order, first_order_by_part
from entropy_experiments.estimate.modes import used_forward_mode, used_mode
from entropy_experiments.estimate.own_batch import own_slopes
from entropy_experiments.estimate.reward import (
    reward_curvature,
    reward_slope,
    reward_slope_by_prompt,
)
from entropy_experiments.models.call_conditions import EXPERTS, expert_configs
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics import derivatives as derivatives_module
from entropy_experiments.numerics.derivatives import NoDerivativeError, pushforward
from entropy_experiments.online.evaluation_rollouts import Fresh
from entropy_experiments.online.probe import OnlineProbe
from entropy_experiments.sampling.decode import Draw, LastLogits, decode
from entropy_experiments.types import Direction, Rollouts, Scores
from oracles.tiny_models import EOS, tiny_lora, tiny_model, tiny_rollouts
from tolerances import SAMPLED_LOGPROB, SLOPES_FP32

pytestmark = pytest.mark.naive

MODES = {
    "qwen2": "jvp",
    "qwen3_moe": "jvp",
    "gpt_oss": "jvp",
    "mixtral": "jvp",
    "deepseek_v2": "jvp",
    "bloom": "double_backward",
    "recurrent_gemma": "double_backward",
    "mamba2": "jvp",
}
MIXTURES = ("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v2")
LR = 1e-3


def policy_of(name: str) -> SequenceProcessor:
    return SequenceProcessor(tiny_model(name))


def sample(seed: int = 0) -> Rollouts:
    lengths = ((3, 9, 5, 4, 6, 3), (4, 7, 2, 5, 3, 6))
    return tiny_rollouts(seed=seed, prompts=lengths[0], responses=lengths[1])


def direction(policy, lr: float = LR) -> Direction:
    """About as long as a step of Adam: every parameter moves by the learning rate."""
    draw = torch.Generator().manual_seed(3)
    two = (
        {n: torch.randn(x.shape, generator=draw).sign() for n, x in policy.params.items()}
        for _ in range(2)
    )
    return Direction(parts=dict(zip(("momentum", "gradient"), two, strict=True)), lr=lr)


@pytest.fixture(scope="module")
def tried():
    """Each model once; most of a test's time is its construction."""
    found = {}

    def policy(name: str) -> SequenceProcessor:
        if name not in found:
            found[name] = policy_of(name)
        return found[name]

    return policy


@pytest.mark.parametrize(("name", "mode"), MODES.items())
def test_auto_takes_the_first_way_that_works_and_says_which(tried, name, mode):
    policy, rollouts = tried(name), sample()
    found = first_order(policy, rollouts, direction(policy), repackings=0)
    assert found.diagnostics["mode"] == mode
    assert found.interval is not None
    exact = first_order(policy, rollouts, direction(policy), mode="reverse", repackings=0)
    assert found.value == pytest.approx(exact.value, rel=5 * SLOPES_FP32)
    again = first_order(policy, rollouts, direction(policy), mode="double_backward", repackings=0)
    assert again.value == pytest.approx(exact.value, rel=5 * SLOPES_FP32)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_go_one_by_one_only_in_forward_mode_and_score_the_same(tried, name):
    policy, rollouts = tried(name), sample()
    configs = expert_configs(policy.model)
    before = [getattr(config, EXPERTS) for config in configs]
    assert before
    assert "eager" not in before
    v = direction(policy).total
    with torch.no_grad():
        plain = policy.score(policy.params, rollouts)
    here, _ = pushforward(lambda p: policy.score(p, rollouts), policy.params, v)
    assert [getattr(config, EXPERTS) for config in configs] == before
    for a_NS, b_NS in zip(plain, here, strict=True):
        assert float((a_NS - b_NS).abs().max()) < 1e-5
    with pytest.raises(RuntimeError, match="stop here"):
        pushforward(_failing, policy.params, v)
    assert [getattr(config, EXPERTS) for config in configs] == before


def _failing(params):
    raise RuntimeError("stop here")


def test_the_trial_is_remembered_with_the_policy_and_forgotten_with_it(monkeypatch):
    policy, rollouts, trials = policy_of("qwen2"), sample(), []
    real = modes_module._first_that_works
    monkeypatch.setattr(
        modes_module, "_first_that_works", lambda *args: trials.append(1) or real(*args)
    )
    for _ in range(3):
        assert used_mode(policy, rollouts, "auto") == "jvp"
    assert len(trials) == 1
    count = len(modes_module._tried)
    del policy
    gc.collect()
    assert len(modes_module._tried) < count


class _Only:
    """A policy that can be differentiated in some ways only."""

    def __init__(self, policy, *, forward: str = "works", backward: str = "works") -> None:
        self._policy, self.params = policy, policy.params
        self.temperature, self.top_p = policy.temperature, policy.top_p
        self.forward, self.backward = forward, backward

    def score(self, params, rollouts):
        scores = self._policy.score(params, rollouts)
        how = {"forward": self.forward, "backward": self.backward}
        return Scores(*(_Guard.apply(x_NS, how) for x_NS in scores))


class _Guard(torch.autograd.Function):
    """The identity, with derivatives that work, are missing, or are wrong."""

    @staticmethod
    def forward(x, how):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.how = inputs[1]

    @staticmethod
    def jvp(ctx, tangent, _):
        if ctx.how["forward"] == "missing":
            raise NotImplementedError("no forward AD here")
        return (1.5 if ctx.how["forward"] == "wrong" else 1.0) * tangent

    @staticmethod
    def backward(ctx, gradient):
        if ctx.how["backward"] == "missing":
            raise RuntimeError("this operation is not differentiable\nat all")
        if ctx.how["backward"] == "once":
            gradient = gradient.detach()
        return gradient, None


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        ({}, "jvp"),
        ({"forward": "missing"}, "double_backward"),
        ({"forward": "wrong"}, "double_backward"),
        ({"forward": "missing", "backward": "once"}, "reverse"),
    ],
)
def test_a_way_that_is_missing_or_wrong_is_passed_over(tried, how, mode):
    """The third has teeth: a forward mode that runs and is wrong is seen by its value."""
    policy = _Only(tried("qwen2"), **how)
    assert used_mode(policy, sample(), "auto") == mode
    wanted = "central" if mode == "reverse" else mode
    assert used_forward_mode(policy, sample(), "auto") == wanted
    found = first_order(policy, sample(), direction(policy), repackings=0)
    exact = first_order(tried("qwen2"), sample(), direction(policy), mode="jvp", repackings=0)
    assert found.value == pytest.approx(exact.value, rel=5 * SLOPES_FP32)
    assert found.diagnostics["mode"] == mode


def test_a_training_is_predicted_by_one_gradient_and_differences(tried):
    """Where a model has reverse mode only: the same predictions, with error bars."""
    policy, rollouts = tried("qwen2"), sample()
    once = _Only(policy, forward="missing", backward="once")
    draw, predicted = torch.Generator().manual_seed(5), []
    gradient = {n: torch.randn(x.shape, generator=draw) for n, x in policy.params.items()}
    for one in (policy, once):
        optimizer = torch.optim.AdamW(list(policy.model.parameters()), lr=1e-4)
        probe = OnlineProbe(one, Fresh(lambda _: rollouts))
        predicted.append(probe.before_step(gradient, optimizer))
    forward, led = (found.change for found in predicted)
    assert (forward.diagnostics["mode"], led.diagnostics["mode"]) == ("jvp", "central")
    assert led.value == pytest.approx(forward.value, rel=5 * SLOPES_FP32)
    assert led.stderr == pytest.approx(forward.stderr, rel=0.05)
    for found in predicted:
        assert found.direct.value + found.state.value == pytest.approx(found.change.value, rel=1e-6)
    with pytest.raises(ValueError, match=r"evaluation='batch'.*neither forward mode nor a double"):
        own_slopes(once, None, direction(policy), {}, mode="central")


def test_no_derivative_at_all_is_refused_in_one_line(tried):
    policy = _Only(tried("qwen2"), forward="missing", backward="missing")
    with pytest.raises(ValueError, match=r"has no derivative: .*not differentiable\)\. Neither"):
        first_order(policy, sample(), direction(policy), repackings=0)


def test_a_mode_that_the_model_lacks_is_refused_in_one_line(tried):
    policy = tried("bloom")
    told = r"cannot be differentiated by 'jvp' .*predict.method: auto"
    with pytest.raises(NoDerivativeError, match=told) as caught:
        first_order(policy, sample(), direction(policy), mode="jvp", repackings=0)
    assert "\n" not in str(caught.value)


def test_other_errors_of_a_model_are_not_called_missing_derivatives():
    with pytest.raises(RuntimeError, match="stop here"):
        pushforward(_failing, {"x": torch.zeros(2)}, {"x": torch.ones(2)}, how="double_backward")


def test_unknown_modes_are_refused(tried):
    policy = tried("qwen2")
    with pytest.raises(ValueError, match=r"mode='forward'; expected one of \('auto', 'jvp'"):
        first_order(policy, sample(), direction(policy), mode="forward")
    with pytest.raises(ValueError, match=r"no per-rollout terms, which this needs; expected 'auto"):
        curvature(policy, sample(), direction(policy), mode="reverse")


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("lr", [1e-4, 0.3])
def test_differences_are_led_by_one_gradient_or_not_trusted(tried, name, lr):
    """The exact slope, always; with about its error bar, or not trusted.

    On gpt_oss and mixtral stencils cross switches of experts: differences alone are up to 15 times
    off here, and their spread 11 times too wide.
    """
    policy, rollouts = tried(name), sample()
    step = direction(policy, lr)
    exact = first_order_by_part(policy, rollouts, step, repackings=0)
    found = first_order_by_part(policy, rollouts, step, mode="central", repackings=0)
    pairs = [(exact.total, found.total), *((exact.lines[k], x) for k, x in found.lines.items())]
    for one, other in pairs:
        assert other.diagnostics["mode"] == "central"
        size = abs(exact.lines["momentum"].value) + abs(exact.lines["gradient"].value)
        assert abs(one.value - other.value) <= 5 * SLOPES_FP32 * size
        assert other.covers(one.value)
        if other.trusted:
            assert other.stderr == pytest.approx(one.stderr, rel=1.0)


def test_the_check_against_reverse_has_teeth(tried, monkeypatch):
    """Differences over a stencil that is far too wide: the value stays, the trust goes."""
    policy, rollouts = tried("mamba2"), sample()
    step = direction(policy, 1e-4)
    exact = first_order(policy, rollouts, step, repackings=0)
    near = first_order(policy, rollouts, step, mode="central", repackings=0)
    assert near.trusted
    monkeypatch.setattr(derivatives_module, "difference_step", lambda *_: 3.0)
    wide = first_order(policy, rollouts, step, mode="central", repackings=0)
    assert wide.value == pytest.approx(exact.value, rel=5 * SLOPES_FP32)
    assert not wide.trusted
    assert any(
        "reverse mode" in reason and "more than the error bar allows" in reason
        for reason in wide.why_not
    )
    for nothing in ("SHARE", "SLACK"):
        monkeypatch.setattr(central_module, nothing, 1e9)
    assert first_order(policy, rollouts, step, mode="central", repackings=0).trusted


def test_rewards_by_differences_are_led_too(tried):
    policy = tried("qwen3_moe")
    rollouts = tiny_rollouts(prompts=(4,) * 12, responses=(3, 4, 5, 6) * 3)
    rollouts = replace(rollouts, prompt_N=torch.arange(12) // 2)
    reward_N, step = torch.arange(12.0) % 5, direction(policy, 1e-4)
    for slope in (reward_slope, reward_slope_by_prompt):
        one, other = (
            slope(policy, rollouts, reward_N, step, mode=mode, repackings=0)
            for mode in ("auto", "central")
        )
        assert other.value == pytest.approx(one.value, rel=1e-3)
        assert (one.diagnostics["mode"], other.diagnostics["mode"]) == ("jvp", "central")
    one, other = (
        reward_curvature(policy, rollouts, reward_N, step, mode=mode, repackings=0)
        for mode in ("auto", "central")
    )
    slopes = [found.diagnostics["slope"].value for found in (one, other)]
    assert slopes[1] == pytest.approx(slopes[0], rel=1e-3)


def test_a_curvature_by_differences_has_the_exact_slope_beside_it(tried):
    policy, rollouts = tried("gpt_oss"), sample()
    step = direction(policy, 1e-4)
    one, other = (
        curvature(policy, rollouts, step, mode=mode, repackings=0) for mode in ("auto", "central")
    )
    slopes = [found.diagnostics["slope"].value for found in (one, other)]
    assert slopes[1] == pytest.approx(slopes[0], rel=1e-3)
    if one.trusted and other.trusted:
        assert other.value == pytest.approx(one.value, rel=0.1)


def test_adapters_of_a_mixture(tried):
    policy = SequenceProcessor(tiny_lora("qwen3_moe"))
    found = first_order(policy, sample(), direction(policy), repackings=0)
    assert found.diagnostics["mode"] == "jvp"
    exact = first_order(policy, sample(), direction(policy), mode="reverse", repackings=0)
    assert found.value == pytest.approx(exact.value, rel=5 * SLOPES_FP32)


@pytest.mark.parametrize("name", ["qwen2", "recurrent_gemma", "mamba2"])
def test_samples_are_of_the_law_that_is_scored(tried, name):
    """RecurrentGemma keeps its state to itself (3 nats off), Mamba takes no cache by this name."""
    policy = tried(name)
    draws = [
        Draw(prompt=tuple(range(5, 5 + n)), seed=seed)
        for seed, n in enumerate((3, 9, 9, 5, 12, 3, 7, 7))
    ]
    logits = LastLogits(policy)
    with torch.no_grad():
        assert logits.cache_is_right == (name == "qwen2")
        drawn = decode(
            logits,
            draws,
            temperature=1.0,
            top_p=1.0,
            max_new_tokens=20,
            ends=(EOS, 6, 7, 8),
            stops=None,
            report=lambda tokens: None,
        )
        for draw, got in zip(draws, drawn, strict=True):
            tokens_NS = torch.tensor([[*draw.prompt, *got.tokens]])
            all_NS = torch.ones_like(tokens_NS, dtype=torch.bool)
            one = Rollouts(
                tokens_NS=tokens_NS,
                attention_NS=all_NS,
                response_NS=all_NS & (torch.arange(tokens_NS.shape[1]) >= len(draw.prompt)),
                prompt_N=torch.zeros(1, dtype=torch.int64),
            )
            scored_S = policy.score(policy.params, one).logprob_NS[0, len(draw.prompt) :]
            assert float((scored_S - torch.tensor(got.logprobs)).abs().max()) < SAMPLED_LOGPROB
    assert len({len(got.tokens) for got in drawn}) > 2
