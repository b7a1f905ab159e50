"""Bad input gets an error that says what was got, what was expected, what to do."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from entropy_experiments import (
    Direction,
    Estimand,
    Objective,
    Rollouts,
    Scores,
    UpdateBatch,
    compute_update_vector_adamw,
    curvature,
    entropy_level,
    first_order,
    first_order_by_part,
    measured,
    measured_many,
    observed,
    read_state,
    resampled,
)
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.loss_names import Loss
from entropy_experiments.numerics.derivatives import pullback, pushforward
from entropy_experiments.sampling.advantages import group_advantages
from entropy_experiments.toy import BigramPolicy
from entropy_experiments.types import AdamGroup, OptimizerState, check_params
from entropy_experiments.update.adamw import adamw_direction
from entropy_experiments.update.gradient import clip_factor, loss_gradient
from entropy_experiments.update.objective import CLIPPED, UNCLIPPED
from entropy_experiments.update.sgd import sgd_direction
from oracles.cases import case, random_direction
from oracles.enumeration import all_rollouts
from oracles.markov import MarkovPolicy
from oracles.tabular import TabularPolicy
from oracles.transformer import TransformerPolicy

pytestmark = pytest.mark.faults


@pytest.fixture
def oracle():
    return case("tabular", 0, 1.0)


def build(**changes):
    fields = {
        "tokens_NS": torch.tensor([[5, 1, 0, 0], [5, 1, 2, 0]]),
        "attention_NS": torch.tensor([[True, True, True, False], [True, True, True, True]]),
        "response_NS": torch.tensor([[False, True, True, False], [False, True, True, True]]),
        "prompt_N": torch.tensor([0, 1]),
    }
    return Rollouts(**{**fields, **changes})


def test_the_builder_builds():
    assert len(build()) == 2
    assert build().weight_N.tolist() == [0.5, 0.5]


NO, YES = False, True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_NS": torch.zeros(2, 4)}, "2-D integer tensor"),
        ({"tokens_NS": torch.zeros(2, 3, 4, dtype=torch.int64)}, "2-D integer tensor"),
        (
            {
                name: torch.zeros(0, 4, dtype=dtype)
                for name, dtype in (
                    ("tokens_NS", torch.int64),
                    ("attention_NS", torch.bool),
                    ("response_NS", torch.bool),
                )
            }
            | {"prompt_N": torch.zeros(0, dtype=torch.int64)},
            "got 0 rollouts, expected at least 1",
        ),
        (
            {"response_NS": torch.ones(2, 3, dtype=torch.bool)},
            r"response_NS has shape \(2, 3\); expected \(2, 4\)",
        ),
        ({"attention_NS": torch.ones(2, 4)}, "attention_NS has dtype torch.float32"),
        ({"prompt_N": torch.tensor([0.0, 1.0])}, "prompt_N has dtype torch.float32"),
        (
            {"response_NS": torch.tensor([[NO, YES, YES, NO], [NO, NO, NO, NO]])},
            r"Rollout 1 has an empty response \(1 of 2 do\)",
        ),
        (
            {"response_NS": torch.tensor([[NO, YES, YES, YES], [NO, YES, YES, YES]])},
            "Rollout 0 marks padding as response",
        ),
        (
            {"response_NS": torch.tensor([[YES, YES, YES, NO], [NO, YES, YES, YES]])},
            "Rollout 0 has a response token with nothing before it",
        ),
        (
            {
                "attention_NS": torch.tensor([[YES, YES, YES, NO], [YES, NO, YES, YES]]),
                "response_NS": torch.tensor([[NO, YES, YES, NO], [NO, NO, YES, YES]]),
            },
            "Rollout 1 has padding between its tokens",
        ),
        (
            {"weight_N": torch.tensor([0.5, 0.4], dtype=torch.float64)},
            "sum to one; got sum 0.9",
        ),
        (
            {"weight_N": torch.tensor([1.5, -0.5], dtype=torch.float64)},
            "non-negative and sum to one; got sum 1, minimum -0.5",
        ),
        (
            {"weight_N": torch.tensor([torch.nan, 0.5], dtype=torch.float64)},
            "weight_N must be non-negative",
        ),
        (
            {"behaviour_logprob_NS": torch.full((2, 4), torch.nan)},
            "behaviour_logprob_NS is nan at rollout 0, position 1",
        ),
        ({"text": ("one",)}, "text has 1 entries; expected one per rollout"),
    ],
)
def test_rollouts(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_update_batch():
    rollouts = build()
    good = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"advantage_NS has shape \(2,\); expected \(2, 4\)"):
        UpdateBatch(rollouts=rollouts, advantage_NS=torch.zeros(2))
    with pytest.raises(ValueError, match="old_logprob_NS is inf at rollout 0, position 1"):
        UpdateBatch(
            rollouts=rollouts, advantage_NS=good, old_logprob_NS=torch.full((2, 4), torch.inf)
        )
    with pytest.raises(ValueError, match="reward_N has shape"):
        UpdateBatch(rollouts=rollouts, advantage_NS=good, reward_N=torch.zeros(3))
    with pytest.raises(ValueError, match="microbatch_N has dtype"):
        UpdateBatch(rollouts=rollouts, advantage_NS=good, microbatch_N=torch.zeros(2))


def test_a_part_is_not_the_whole(oracle):
    part = oracle.rollouts.take(torch.arange(5))
    with pytest.raises(ValueError, match="a part of a batch"):
        entropy_level(oracle.policy, part)
    with pytest.raises(ValueError, match="microbatch is 0; expected at least 1"):
        entropy_level(oracle.policy, oracle.rollouts, microbatch=0)


@pytest.mark.parametrize("estimator", [first_order, curvature])
def test_direction_from_another_model(oracle, estimator):
    foreign = Direction(parts={"gradient": {"lora_A": torch.zeros(2)}}, lr=1.0)
    with pytest.raises(ValueError, match=r"missing \['table'\], unknown \['lora_A'\]"):
        estimator(oracle.policy, oracle.rollouts, foreign)
    with pytest.raises(ValueError, match=r"missing \['table'\], unknown \['lora_A'\]"):
        measured(oracle.policy, oracle.rollouts, foreign, 0.1)
    shape = oracle.policy.params["table"].shape
    wrong = Direction(parts={"gradient": {"table": torch.zeros(2, 3)}}, lr=1.0)
    with pytest.raises(ValueError, match=rf"shape \(2, 3\) for 'table'; expected \({shape[0]}, "):
        estimator(oracle.policy, oracle.rollouts, wrong)
    with pytest.raises(ValueError, match="missing"):
        resampled(oracle.policy, lambda *a: None, foreign, 0.1, generator=torch.Generator())


def test_directions():
    ones = {"a": torch.ones(2)}
    with pytest.raises(ValueError, match=r"learning rate 0.0; expected a positive.* `lr`"):
        Direction(parts={"gradient": ones}, lr=0.0)
    with pytest.raises(ValueError, match="no parts"):
        Direction(parts={}, lr=1.0)
    with pytest.raises(ValueError, match=r"part 'decay' .*missing \['a'\], unknown \['b'\]"):
        Direction(parts={"gradient": ones, "decay": {"b": torch.ones(2)}}, lr=1.0)
    with pytest.raises(ValueError, match="1 non-finite values of 2 in 'a'"):
        Direction(parts={"gradient": {"a": torch.tensor([1.0, torch.nan])}}, lr=1.0)
    with pytest.raises(ValueError, match="after the step does not fit"):
        observed(ones, {"b": torch.ones(2)}, 0.1)
    with pytest.raises(ValueError, match="does not fit the parameters"):
        pushforward(lambda p: p["a"], ones, {"b": torch.ones(2)})
    with pytest.raises(ValueError, match="how='magic'; expected one of"):
        pushforward(lambda p: p["a"], ones, ones, how="magic")
    check_params("same", ones, ones)


class NotANumber(TabularPolicy):
    def score(self, params, rollouts):
        l_NS, h_NS = super().score(params, rollouts)
        broken_NS = h_NS.clone()
        broken_NS[rollouts.tokens_NS == 2] = torch.nan
        return Scores(l_NS, broken_NS)


def test_nan_in_logits(oracle):
    """From a NaN parameter, and from a policy that goes wrong at one token."""
    table = oracle.policy.params["table"].clone()
    table[0, 0] = torch.nan
    sick = replace(oracle.policy, params={"table": table})
    for call in (
        lambda: entropy_level(sick, oracle.rollouts),
        lambda: first_order(sick, oracle.rollouts, oracle.direction),
        lambda: measured(sick, oracle.rollouts, oracle.direction, 0.1),
        lambda: curvature(sick, oracle.rollouts, oracle.direction),
    ):
        with pytest.raises(ValueError, match="logprob_NS = nan for rollout 0, position 1"):
            call()
    worse = NotANumber(**vars(oracle.policy))
    with pytest.raises(ValueError, match=r"entropy_NS = nan for rollout \d+, .* \(token 2\)"):
        entropy_level(worse, oracle.rollouts)


def test_a_policy_that_forgets_the_shape(oracle):
    class Flat(TabularPolicy):
        def score(self, params, rollouts):
            return Scores(*(x_NS[:, 1:] for x_NS in super().score(params, rollouts)))

    with pytest.raises(ValueError, match=r"expected .*, the shape of tokens_NS"):
        entropy_level(Flat(**vars(oracle.policy)), oracle.rollouts)


def test_gradients():
    params = {"a": torch.ones(3), "b": torch.ones(2)}
    with pytest.raises(ValueError, match=r"1 of 2 parameters get no gradient: \['b'\].*reentrant"):
        pullback(lambda p: p["a"].sum(), params)
    with pytest.raises(ValueError, match="does not depend on any parameter: it is a constant"):
        pullback(lambda p: torch.zeros(()), params)


def adam(params, **changes):
    group = AdamGroup(names=tuple(params), lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    return OptimizerState(groups=(replace(group, **changes),), state={})


def test_optimizers():
    params = {"a": torch.ones(3), "b": torch.ones(2)}
    gradient = {"a": torch.ones(3), "b": torch.ones(2)}
    with pytest.raises(ValueError, match=r"gradient has 3 non-finite values of 3 in 'a'"):
        adamw_direction(params, {**gradient, "a": torch.full((3,), torch.nan)}, adam(params))
    with pytest.raises(ValueError, match=r"gradient does not fit .*missing \['b'\]"):
        adamw_direction(params, {"a": torch.ones(3)}, adam(params))
    with pytest.raises(ValueError, match=r"missing \['b'\], unknown \['z'\]"):
        adamw_direction(params, gradient, adam(params, names=("a", "z")))
    with pytest.raises(ValueError, match=r"learning rate is 0\.0.* `lr`"):
        adamw_direction(params, gradient, adam(params, lr=0.0))
    with pytest.raises(ValueError, match="type AdamGroup; expected SGDGroup"):
        sgd_direction(params, gradient, adam(params))
    moments = {"step": 3.0, "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    half = replace(adam(params), state={"a": moments})
    with pytest.raises(ValueError, match=r"state for 1 of 2 parameters; missing \['b'\]"):
        adamw_direction(params, gradient, half)
    swapped = replace(adam(params), state={"a": moments, "b": moments})
    with pytest.raises(ValueError, match=r"exp_avg of 'b' has shape \(3,\); .*\(2,\)"):
        adamw_direction(params, gradient, swapped)
    bare = replace(adam(params), state={"a": {"step": 1.0}, "b": moments})
    with pytest.raises(ValueError, match="state of 'a' has no 'exp_avg'"):
        adamw_direction(params, gradient, bare)
    with pytest.raises(ValueError, match=r"\['a'\] are in more than one group"):
        adam(params, names=("a", "a"))
    with pytest.raises(ValueError, match=r"State belongs to no group: \['z'\]"):
        replace(adam(params), state={"z": moments})
    leaf = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="1 of 1 parameters of an optimizer group are not"):
        read_state(torch.optim.AdamW([leaf]), {"other": torch.ones(2)})
    with pytest.raises(TypeError, match="Got RMSprop; expected torch's Adam"):
        read_state(torch.optim.RMSprop([leaf]), {"leaf": leaf})


def test_equal_rewards_without_a_baseline(oracle):
    """No advantage, no momentum, no decay: there is no step to speak of."""
    policy, rollouts = oracle.policy, oracle.rollouts
    batch = UpdateBatch(
        rollouts=rollouts,
        advantage_NS=torch.zeros(rollouts.tokens_NS.shape, dtype=torch.float64),
    )
    with pytest.raises(ValueError, match="every group has equal rewards"):
        compute_update_vector_adamw(policy, batch, Objective(), adam(policy.params))
    # With decay there is one, and it is all baseline.
    direction, baseline, _ = compute_update_vector_adamw(
        policy, batch, Objective(), adam(policy.params, weight_decay=0.1)
    )
    assert torch.equal(direction.total["table"], baseline.total["table"])
    assert float(direction.gradient["table"].abs().max()) == 0.0


def test_a_loss_that_has_a_name_and_no_formula(oracle):
    """A name added to the list alone must not fall into another loss's formula."""
    rollouts = oracle.rollouts
    batch = UpdateBatch(rollouts=rollouts, advantage_NS=torch.zeros(rollouts.tokens_NS.shape))
    scores = oracle.policy.score(oracle.policy.params, rollouts)
    objective = Objective()
    object.__setattr__(objective, "loss", "gspo2")
    with pytest.raises(ValueError, match=r"'gspo2' has a name .* no formula in Objective.token_w"):
        objective.token_weights(batch)
    weights = Objective().token_weights(batch)
    with pytest.raises(ValueError, match=r"'gspo2' has a name .* no formula in Objective.weighted"):
        objective.weighted(scores, batch, weights)


def test_every_loss_is_clipped_or_not():
    assert sorted((*CLIPPED, *UNCLIPPED)) == sorted(get_args(Loss))


def test_objectives(oracle):
    with pytest.raises(ValueError, match="loss is 'ppo'; expected one of"):
        Objective(loss="ppo")
    with pytest.raises(ValueError, match=r"Objective\(max_completion_length="):
        Objective(loss="dr_grpo")
    rollouts = oracle.rollouts
    batch = UpdateBatch(rollouts=rollouts, advantage_NS=torch.zeros(rollouts.tokens_NS.shape))
    scores = oracle.policy.score(oracle.policy.params, rollouts)
    with pytest.raises(ValueError, match=r"beta is 0\.1 but the batch has no ref_logprob_NS"):
        Objective(beta=0.1)(scores, batch)


def test_estimands():
    with pytest.raises(ValueError, match="unit is 'word'; expected one of"):
        Estimand(unit="word")
    with pytest.raises(ValueError, match=r"temperature is 0; expected above 0"):
        Estimand(temperature=0)
    with pytest.raises(ValueError, match=r"top_p is 1\.5; expected in"):
        Estimand(top_p=1.5)


def test_estimates_of_different_things_are_not_compared(oracle):
    fixed = {"prompts": "fixed", "repackings": 0}
    slope = first_order(oracle.policy, oracle.rollouts, oracle.direction, form="matched", **fixed)
    other = measured(
        oracle.policy, oracle.rollouts, oracle.direction, 0.1, form="per_decision", **fixed
    )
    with pytest.raises(ValueError, match="mean different things"):
        _ = 0.1 * slope - other
    right = measured(oracle.policy, oracle.rollouts, oracle.direction, 0.1, form="snis", **fixed)
    assert (0.1 * slope - right).interval is not None


def test_partly_shared_prompts_have_no_interval():
    policy = MarkovPolicy.random(0, horizon=20)
    rollouts = policy.draw(10, 2, torch.Generator().manual_seed(0))
    moved = replace(rollouts, prompt_N=rollouts.prompt_N + 5)
    a, b = (entropy_level(policy, r) for r in (rollouts, moved))
    with pytest.raises(ValueError, match="share 5 of their prompts, not all"):
        _ = a - b


def test_few_prompts_have_no_population_interval():
    policy = MarkovPolicy.random(0, horizon=20)
    rollouts = policy.draw(4, 8, torch.Generator().manual_seed(0))
    found = entropy_level(policy, rollouts)
    assert found.interval is None
    assert not found.trusted
    assert "4 prompts: an interval for a population needs at least 5" in found.why_not[0]
    with pytest.raises(ValueError, match="has no interval: 4 prompts"):
        found.covers(1.0)
    assert entropy_level(policy, rollouts, prompts="fixed").interval is not None
    one = policy.draw(1, 8, torch.Generator().manual_seed(0))
    assert "needs at least 5" in str(entropy_level(policy, one))
    singles = policy.draw(8, 1, torch.Generator().manual_seed(0))
    lonely = entropy_level(policy, singles, prompts="fixed")
    assert "has one rollout: no spread" in lonely.why_not[0]
    assert entropy_level(policy, singles).interval is not None


def test_steps_too_large_to_measure():
    policy = MarkovPolicy.random(0, horizon=100)
    rollouts = policy.draw(40, 4, torch.Generator().manual_seed(0))
    direction = policy.direction(1)
    far = measured(policy, rollouts, direction, 1.0, form="snis", repackings=0)
    assert not far.trusted
    assert any("effective sample size" in reason for reason in far.why_not)
    near = measured(policy, rollouts, direction, 0.003, repackings=0)
    assert near.trusted, near.why_not
    with pytest.raises(ValueError, match="Importance weights leave the range of fp64"):
        measured(policy, rollouts, direction, 1e4, form="snis", repackings=0)
    with pytest.raises(ValueError, match=r"etas is \[\]"):
        measured_many(policy, rollouts, {"v": direction}, [])
    with pytest.raises(ValueError, match=r"estimate\.resampled"):
        measured(policy, rollouts, direction, 0.1, form="resampled")


def test_top_p_support():
    """A truncated distribution: sloped on its frozen support, refused when the support moves."""
    wide = TabularPolicy.random(0, vocabulary=5, horizon=3)
    policy = replace(wide, top_p=0.8)
    listed = all_rollouts(wide)
    with torch.no_grad():
        logp_N = policy.score(policy.params, listed).logprob_NS.sum(1)
    inside = (logp_N > -torch.inf).nonzero().squeeze(1)
    rollouts = replace(listed.take(inside), weight_N=logp_N[inside].exp() / 2, share=1.0)
    direction = random_direction(policy, 0)
    with pytest.raises(ValueError, match=r"outside the policy's top_p support"):
        entropy_level(policy, listed)
    tiny = measured(policy, rollouts, direction, 1e-6, prompts="fixed", repackings=0)
    slope = first_order(policy, rollouts, direction, prompts="fixed", repackings=0)
    assert tiny.value == pytest.approx(1e-6 * slope.value, rel=1e-4)
    with pytest.raises(ValueError, match=r"top_p = 0\.8 support changes at \d+ of \d+ tokens"):
        measured(policy, rollouts, direction, 3.0, prompts="fixed", repackings=0)


def test_baselines(oracle):
    call = {"policy": oracle.policy, "direction": oracle.direction, "prompts": "fixed"}
    with pytest.raises(ValueError, match="defined for the to_go form"):
        first_order(rollouts=oracle.rollouts, form="matched", baseline=True, **call)
    with pytest.raises(ValueError, match="form='greedy'; expected one of"):
        first_order(rollouts=oracle.rollouts, form="greedy", **call)
    with pytest.raises(ValueError, match="needs entropy='rao_blackwell'"):
        first_order(rollouts=oracle.rollouts, entropy="simple", baseline=True, **call)
    one = replace(oracle.rollouts, prompt_N=torch.zeros_like(oracle.rollouts.prompt_N))
    with pytest.raises(ValueError, match="at least 2 prompts"):
        first_order(rollouts=one, baseline=True, **call)
    stale = replace(
        oracle.rollouts, behaviour_logprob_NS=torch.zeros(oracle.rollouts.tokens_NS.shape)
    )
    with pytest.raises(ValueError, match="drew itself"):
        first_order(rollouts=stale, baseline=True, **call)


def test_a_sampler_that_reuses_old_rollouts(oracle):
    stale = replace(
        oracle.rollouts, behaviour_logprob_NS=torch.zeros(oracle.rollouts.tokens_NS.shape)
    )
    with pytest.raises(ValueError, match="drawn from the very parameters"):
        resampled(
            oracle.policy,
            lambda params, generator: stale,
            oracle.direction,
            0.1,
            generator=torch.Generator(),
        )


def test_reduced_matmul_precision(oracle):
    """fp32 at TF32 precision is refused; fp64 does not care."""
    policy = TransformerPolicy(0, dtype=torch.float32)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(RuntimeError, match=r"set_float32_matmul_precision\('highest'\)"):
            entropy_level(policy, oracle.rollouts)
        entropy_level(oracle.policy, oracle.rollouts)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_stale_rollouts_that_cannot_speak_are_not_trusted():
    policy = MarkovPolicy.random(0, horizon=60)
    old = {"table": policy.params["table"] + 0.5 * policy.direction(3).total["table"]}
    rollouts = policy.draw(16, 4, torch.Generator().manual_seed(0), params=old)
    with torch.no_grad():
        behaviour_NS = policy.score(old, rollouts).logprob_NS
    stale = replace(rollouts, behaviour_logprob_NS=behaviour_NS)
    for found in (
        entropy_level(policy, stale),
        first_order(policy, stale, policy.direction(1), repackings=0),
        first_order(policy, stale, policy.direction(1), mode="reverse", repackings=0),
        curvature(policy, stale, policy.direction(1), repackings=0),
        measured(policy, stale, policy.direction(1), 0.001, repackings=0),
    ):
        assert any("effective sample size" in reason for reason in found.why_not)


def test_truncated_laws_have_no_differences(oracle):
    policy = replace(oracle.policy, top_p=0.9)
    with pytest.raises(ValueError, match="step over changes of the truncated distribution"):
        first_order(policy, oracle.rollouts, oracle.direction, mode="central")
    with pytest.raises(ValueError, match=r"Curvature at top_p = 0\.9:"):
        curvature(policy, oracle.rollouts, oracle.direction)
    stale = replace(
        oracle.rollouts, behaviour_logprob_NS=torch.zeros(oracle.rollouts.tokens_NS.shape)
    )
    with pytest.raises(ValueError, match="no weight repairs that"):
        measured(policy, stale, oracle.direction, 0.1)
    blind = MarkovPolicy.random(0, horizon=5)
    blind.top_p = 0.9
    rollouts = blind.draw(4, 1, torch.Generator().manual_seed(0))
    with pytest.raises(TypeError, match="no method `support`"):
        measured(blind, rollouts, blind.direction(0), 1e-9, repackings=0)


def test_a_step_too_small_for_the_parameters_dtype():
    policy = TransformerPolicy(0, dtype=torch.float32)
    rollouts = all_rollouts(policy)
    direction = random_direction(policy, 0)
    found = measured(policy, rollouts, direction, 1e-7, prompts="fixed", repackings=0)
    assert any("lost when theta + eta v is stored" in reason for reason in found.why_not)
    fine = measured(policy, rollouts, direction, 1e-3, prompts="fixed", repackings=0)
    assert fine.diagnostics["step_rounding"] < 1e-3


def test_losses_count_response_tokens_only():
    with pytest.raises(ValueError, match="loss_NS counts tokens that are not in the response"):
        UpdateBatch(
            rollouts=build(),
            advantage_NS=torch.zeros(2, 4),
            loss_NS=torch.ones(2, 4, dtype=torch.bool),
        )


def test_reasons_for_doubt_reach_the_verdict():
    """A change below the noise floor is doubted; a difference below it is agreement."""
    policy = TransformerPolicy(3, dtype=torch.float32, width=128)
    rollouts = all_rollouts(policy)
    direction = random_direction(policy, 3, size=0.05)
    tiny = measured(policy, rollouts, direction, 1e-9, prompts="fixed")
    assert any("below the noise floor" in reason for reason in tiny.why_not)
    real = measured(policy, rollouts, direction, 1e-2, prompts="fixed")
    assert not any("noise floor" in reason for reason in real.why_not)
    assert not any("noise floor" in reason for reason in (real - real).why_not)


def test_reverse_mode_has_no_interval_and_gives_none(oracle):
    fixed = {"prompts": "fixed", "repackings": 0}
    call = (oracle.policy, oracle.rollouts, oracle.direction)
    reverse = first_order(*call, mode="reverse", **fixed)
    forward = first_order(*call, **fixed)
    assert reverse.interval is None
    assert (reverse - forward).stderr is None
    assert "no standard error" in reverse.why_not[0]
    terms = forward.diagnostics
    assert reverse.diagnostics["direct"] == pytest.approx(terms["direct"].value, rel=1e-9)
    assert reverse.diagnostics["state"] == pytest.approx(terms["state"].value, rel=1e-9)
    scaled = 0.5 * forward
    assert scaled.diagnostics["direct"].value == pytest.approx(0.5 * terms["direct"].value)


def test_two_small_samples_do_not_make_a_population():
    policy = MarkovPolicy.random(0, horizon=20)
    a, b = (policy.draw(4, 4, torch.Generator().manual_seed(s)) for s in (0, 1))
    b = replace(b, prompt_N=b.prompt_N + 100)
    difference = entropy_level(policy, a) - entropy_level(policy, b)
    assert difference.interval is None
    assert "4 prompts" in difference.why_not[0]


def test_a_score_that_ignores_its_parameters(oracle):
    class Deaf(TabularPolicy):
        def score(self, params, rollouts):
            return super().score(self.params, rollouts)

    deaf = Deaf(**vars(oracle.policy))
    with pytest.raises(ValueError, match="functional_call"):
        first_order(deaf, oracle.rollouts, oracle.direction, repackings=0)
    with pytest.raises(ValueError, match="functional_call"):
        measured(deaf, oracle.rollouts, oracle.direction, 0.1, repackings=0)
    still = Direction(parts={"decay": {"table": torch.zeros_like(deaf.params["table"])}}, lr=1.0)
    assert measured(deaf, oracle.rollouts, still, 0.1, prompts="fixed", repackings=0).value == 0.0


def test_dropout_left_on(oracle):
    class Moody(TabularPolicy):
        def score(self, params, rollouts):
            self.mood = not getattr(self, "mood", False)
            return Scores(*(x + 0.1 * self.mood for x in super().score(params, rollouts)))

    moody = Moody(**vars(oracle.policy))
    for call in (
        lambda: entropy_level(moody, oracle.rollouts),
        lambda: first_order(moody, oracle.rollouts, oracle.direction),
        lambda: measured(moody, oracle.rollouts, oracle.direction, 0.1),
        lambda: curvature(moody, oracle.rollouts, oracle.direction),
    ):
        with pytest.raises(ValueError, match=r"Is dropout on\? Call model\.eval\(\)"):
            call()


def test_things_of_the_wrong_kind(oracle):
    policy, rollouts, direction = oracle.policy, oracle.rollouts, oracle.direction
    batch = UpdateBatch(rollouts=rollouts, advantage_NS=torch.ones(rollouts.tokens_NS.shape))
    leaf = torch.ones(2, requires_grad=True)
    live = torch.optim.AdamW([leaf])
    with pytest.raises(TypeError, match=r"Got a tuple as direction.*returns \(direction, base"):
        first_order(policy, rollouts, (direction, None, None))
    with pytest.raises(TypeError, match=r"Got a UpdateBatch as rollouts.*`\.rollouts`"):
        first_order(policy, batch, direction)
    with pytest.raises(TypeError, match="Got Rollouts as update batch"):
        compute_update_vector_adamw(policy, rollouts, Objective(), adam(policy.params))
    with pytest.raises(TypeError, match=r"Got a AdamW as optimizer.*read_state"):
        compute_update_vector_adamw(policy, batch, Objective(), live)
    with pytest.raises(TypeError, match=r"Got a list of names.*named_parameters"):
        read_state(live, [leaf])
    with pytest.raises(ValueError, match=r"mode='forward'; expected one of .*'reverse'"):
        first_order(policy, rollouts, direction, mode="forward")


def test_short_words_for_long_results(oracle):
    found = first_order(
        oracle.policy, oracle.rollouts, oracle.direction, prompts="fixed", repackings=0
    )
    assert len(repr(found)) < 200
    assert float(found / 2) == found.value / 2
    by_part = first_order_by_part(
        oracle.policy, oracle.rollouts, oracle.direction, prompts="fixed", repackings=0
    )
    assert [line.split()[0] for line in str(by_part).splitlines()] == [
        "total",
        "momentum",
        "decay",
        "gradient",
        "unexplained",
    ]


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_clipping_to_a_norm_that_is_none(value):
    with pytest.raises(ValueError, match=r"max_grad_norm is .*; expected a number above 0"):
        clip_factor({"w": torch.ones(2)}, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip_low", -1.0),
        ("clip_high", float("nan")),
        ("beta", float("nan")),
        ("entropy_coef", float("inf")),
    ],
)
def test_options_of_the_loss_that_are_no_sizes(name, value):
    with pytest.raises(ValueError, match=rf"Objective.{name} is {value}; expected"):
        Objective(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("microbatch", 2.5),
        ("microbatch", True),
        ("microbatch", "8"),
        ("forward_microbatch", 1.5),
        ("horizon", 0),
        ("horizon", 2.5),
        ("repackings", -1),
    ],
)
def test_counts_that_are_none(name, value):
    with pytest.raises(ValueError, match=rf"EstimatorOptions.{name} is .*; expected at least"):
        EstimatorOptions(**{name: value})


class _Wrong(BigramPolicy):
    """Scores that are not what their names say."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def score(self, params, rollouts):
        return self.change(super().score(params, rollouts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: Scores(s.logprob_NS.exp(), s.entropy_NS), "logprob_NS = .*; expected at most 0"),
        (lambda s: Scores(s.logprob_NS, -s.entropy_NS), "entropy_NS = .*; expected at least 0"),
    ],
)
def test_scores_that_no_distribution_has(change, message):
    policy = _Wrong(change)
    with pytest.raises(ValueError, match=message):
        entropy_level(policy, policy.draw(seed=2))


def test_probabilities_in_place_of_log_probs():
    policy = BigramPolicy()
    batch = policy.update_batch(seed=1)
    probability_NS = policy.score(policy.params, batch.rollouts).logprob_NS.detach().exp()
    with pytest.raises(ValueError, match="old_logprob_NS is above 0 on 128 of 128"):
        loss_gradient(policy, replace(batch, old_logprob_NS=probability_NS), Objective())
    stale = replace(batch.rollouts, behaviour_logprob_NS=probability_NS)
    with pytest.raises(ValueError, match="behaviour_logprob_NS is above 0"):
        entropy_level(policy, stale)


def test_a_learning_rate_without_digits():
    with pytest.raises(ValueError, match=r"learning rate 1e-320; expected at least 2.2.*larger"):
        Direction(parts={"gradient": {"w": torch.ones(2)}}, lr=1e-320)


def test_a_temperature_at_which_nothing_moves():
    policy = BigramPolicy(temperature=1e30)
    direction = Direction(parts={"gradient": {"table": torch.eye(5).double()}}, lr=0.1)
    with pytest.raises(ValueError, match=r"At temperature 1e\+30 every token is as likely"):
        measured(policy, policy.draw(seed=2), direction, 0.1)


def test_rewards_whose_spread_overflows():
    reward_N = torch.tensor([1e308, -1e308, 1e308, -1e308], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"Rewards of up to 1e\+308 .*Scale them down"):
        group_advantages(reward_N, 2)
