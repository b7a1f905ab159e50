"""Influence of a model cut over ranks: by differences along P g_H, against the whole model's jvp.

The quick tests cut nothing: a bigram policy that says it is in lockstep with another rank goes the
same way through idle microbatches, single backwards and differences, in fp64 and one process. The
slow ones cut real models over two and three gloo ranks, unevenly, and compare with one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from entropy_experiments import AdamGroup, Estimate, Objective, OptimizerState, StepOptions
from entropy_experiments.attribution import jacobian, tokens, whatif
from entropy_experiments.attribution.analyze import analyze_step
from entropy_experiments.attribution.jacobian import Differences
from entropy_experiments.attribution.leave_one_out import leave_one_out
from entropy_experiments.attribution.step import (
    FULL,
    StepInputs,
    close_ledger,
    close_reward_ledger,
    line_slopes,
    measure_rollouts,
    measure_step,
    rebuild_step,
    score_evaluation,
    step_inputs,
    token_influences,
)
from entropy_experiments.attribution.terms import line_directions
from entropy_experiments.attribution.tokens import TokenInfluence
from entropy_experiments.distributed import Ranks, across
from entropy_experiments.estimate.options import EstimatorOptions
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.models.sharded import MODES, ShardedModel, ShardedPolicy
from entropy_experiments.numerics.derivatives import dot, dots
from entropy_experiments.sampling.advantages import advantages_by_prompt
from entropy_experiments.toy import BigramPolicy
from entropy_experiments.types import Rollouts, Scores, UpdateBatch
from models.test_sharded import _model, _state
from oracles.processes import on_ranks
from oracles.tiny_models import tiny_rollouts

MICROBATCH, LR = 2, 1e-3
OBJECTIVE = Objective(beta=0.05, entropy_coef=0.01)
QUESTION = "drop=negative"
DIFFERENCES = 1e-7
"""Of fp64 differences against forward mode, by the largest."""


class Lockstep(BigramPolicy):
    """In one process what a cut model is on each rank: half of the passes are idle."""

    lockstep, modes = 2, MODES

    def score(self, params: Mapping[str, Tensor], rollouts: Rollouts) -> Scores:
        scores = super().score(params, rollouts)
        return Scores(*map(_OneBackward.apply, scores)) if torch.is_grad_enabled() else scores


class _OneBackward(torch.autograd.Function):
    """As FSDP's pass: a second backward finds nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.used = False
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        assert not ctx.used, "a second backward through the same scores"
        ctx.used = True
        return grads[0]


def adam(policy: Any) -> OptimizerState:
    generator = torch.Generator().manual_seed(3)
    group = AdamGroup(
        names=tuple(policy.params), lr=0.02, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1
    )
    state = {
        name: {
            "step": 3,
            "exp_avg": 0.01 * torch.randn(p.shape, generator=generator, dtype=p.dtype),
            "exp_avg_sq": 1e-4 * torch.rand(p.shape, generator=generator, dtype=p.dtype),
        }
        for name, p in policy.params.items()
    }
    return OptimizerState(groups=(group,), state=state)


def toy(policy: BigramPolicy, mode: Any = "auto") -> tuple[StepInputs, Rollouts]:
    batch = policy.update_batch(seed=1)
    with torch.no_grad():
        old_NS = policy.score(policy.params, batch.rollouts).logprob_NS
    batch = replace(batch, old_logprob_NS=old_NS - 0.05, ref_logprob_NS=old_NS + 0.1)
    estimator = EstimatorOptions(mode=mode, microbatch=9, repackings=0)
    options = StepOptions(objective=OBJECTIVE, max_grad_norm=0.05, estimator=estimator)
    return step_inputs(policy, adam(policy), batch, options), policy.draw(seed=2)


def studied(step: StepInputs, evaluation: Rollouts, reward_N: Tensor) -> dict[str, Any]:
    """The stages of a study without a matrix."""
    rebuilt, _ = rebuild_step(step)
    base = score_evaluation(step.policy, evaluation, step.estimator)
    influence = token_influences(step, rebuilt, evaluation, base.scores, None, folds=2)
    lines = line_directions(
        step.trained,
        step.batch,
        step.options.objective,
        rebuilt.direction,
        microbatch=step.estimator.microbatch,
        scores=rebuilt.scores,
    )
    lr = rebuilt.direction.lr
    changes = measure_step(step, rebuilt, evaluation, base.scores, (lr,))
    slopes = line_slopes(step, rebuilt, evaluation, base.scores, lines)
    ledger = close_ledger(step, rebuilt, evaluation, base.scores, slopes, changes[FULL, lr])
    reward = close_reward_ledger(
        step, rebuilt, evaluation, reward_N, base.scores, None, None, lambda: lines
    )
    confirmed = whatif.confirm(
        step.policy,
        evaluation,
        step.trained,
        influence,
        rebuilt.direction,
        step.optimizer,
        QUESTION,
        max_grad_norm=step.options.max_grad_norm,
        mode=step.estimator.mode,
        microbatch=step.estimator.microbatch,
        base=base.scores,
        repackings=0,
    )
    singles = measure_rollouts(
        step,
        rebuilt,
        evaluation,
        base.scores,
        influence.coefficient,
        [0, 2],
        (lr,),
        noise_floor=None,
    )
    return {
        "influence": influence,
        "step norms": list(rebuilt.norms.values()),
        "ledger": [*ledger.lines.values(), ledger.predicted, ledger.measured],
        "curvature": ledger.curvature,
        "reward": [*reward.lines.values(), reward.predicted, reward.measured],
        "what if": [confirmed.prediction.total, confirmed.prediction.change],
        "confirmed": [confirmed.frozen, confirmed.recomputed, confirmed.measured],
        "singles": list(singles.values()),
    }


def rewards(rollouts: Rollouts) -> Tensor:
    return (torch.arange(len(rollouts)) % 3 == 0).double()


def by_tokens(influence: TokenInfluence) -> dict[str, Any]:
    return {
        "tokens": influence.value_NS,
        "rollouts": influence.rollout_N,
        "standard errors": influence.stderr_N,
        "by reverse": influence.gradient_by_reverse,
        "baseline": list(influence.baseline.values()),
        "modules": [value for parts in influence.modules.values() for value in parts.values()],
        "total": influence.total,
    }


def flat(value: Any) -> Tensor:
    if isinstance(value, Estimate):
        value = [value.value, value.stderr or 0.0]
    if isinstance(value, list):
        return torch.cat([flat(x) for x in value])
    return torch.as_tensor(value).detach().double().flatten()


def gap(one: Any, other: Any) -> float:
    """Largest difference, relative to the largest value."""
    one_X, other_X = flat(one), flat(other)
    return float((one_X - other_X).abs().max() / one_X.abs().max())


@pytest.mark.naive
def test_differences_in_lockstep_give_the_study_of_forward_mode():
    """Tokens, standard errors, ledger, reward, what-ifs, single rollouts: idle passes add none."""
    whole = studied(*toy(BigramPolicy(), "jvp"), rewards(BigramPolicy().draw(seed=2)))
    cut = studied(*toy(Lockstep(), "central"), rewards(Lockstep().draw(seed=2)))
    exact, influence = whole.pop("influence"), cut.pop("influence")
    assert influence.closes
    assert not influence.doubts
    assert len(influence.differences) == 2
    assert not exact.differences
    for name, value in by_tokens(exact).items():
        assert gap(value, by_tokens(influence)[name]) < DIFFERENCES, name
    for name, value in whole.items():
        assert gap(value, cut[name]) < (1e-3 if name == "curvature" else 1e-6), name


@pytest.mark.naive
def test_leaving_out_a_rollout_needs_no_gradients_by_rollout():
    out = []
    for policy in (BigramPolicy(), Lockstep()):
        step, _ = toy(policy)
        without = leave_one_out(
            step.trained,
            replace(step.batch, old_logprob_NS=None, ref_logprob_NS=None),
            Objective(),
            step.optimizer,
            3,
            advantage_of=lambda r_N, p_N: r_N - _group_mean(r_N, p_N),
            microbatch=9,
        )
        out.append(without.direction.total["table"])
    assert gap(*out) < 1e-12


def _group_mean(reward_N: Tensor, prompt_N: Tensor) -> Tensor:
    return torch.stack([reward_N[prompt_N == p].mean() for p in prompt_N])


def influence_of(policy: Any = None) -> TokenInfluence:
    step, evaluation = toy(policy or Lockstep(), "central")
    rebuilt, _ = rebuild_step(step)
    base = score_evaluation(step.policy, evaluation, step.estimator)
    return token_influences(step, rebuilt, evaluation, base.scores, None, folds=2)


def _turned_round(take: Differences, *given: Any) -> Scores:
    return Scores(*(-x for x in CALL(take, *given)))


CALL = Differences.__call__


@pytest.mark.parametrize("broken", ["sign", "preconditioner", "width"])
def test_a_sum_rule_that_does_not_close_is_told(monkeypatch, broken):
    """Teeth: each mistake that could be made along u = P g_H leaves a doubt."""
    if broken == "sign":
        monkeypatch.setattr(Differences, "__call__", _turned_round)
    elif broken == "width":
        monkeypatch.setattr(jacobian, "SCALES", (3e5,))
        monkeypatch.setattr(jacobian, "difference_step", lambda p, v, lr: 3e5 * lr)
    else:
        slopes = tokens.score_slopes

        def without_p(policy: Any, rollouts: Rollouts, many: Any, **options: Any) -> Any:
            return slopes(policy, rollouts, [_squared(v) for v in many], **options)

        monkeypatch.setattr(tokens, "score_slopes", without_p)
    influence = influence_of()
    assert not influence.closes
    assert any("the sum rule does not close" in doubt for doubt in influence.doubts)
    if broken == "width":
        assert any("away from what the gradient says" in doubt for doubt in influence.doubts)


def _squared(v: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Another metric than P's."""
    return {name: x * (1 + x.abs() / x.abs().max()) for name, x in v.items()}


def test_a_whole_model_refuses_what_a_cut_one_doubts(monkeypatch):
    """It has exact modes to go to."""
    monkeypatch.setattr(jacobian, "SCALES", (3e5,))
    monkeypatch.setattr(jacobian, "difference_step", lambda p, v, lr: 3e5 * lr)
    with pytest.raises(ValueError, match=r"mode='central': differences of the scores .* mode='aut"):
        influence_of(BigramPolicy())


def test_widths_are_told_in_steps():
    influence = influence_of()
    for one, wide in zip(influence.differences, influence.steps_wide, strict=True):
        assert wide == pytest.approx(one.length / influence.reach)
        assert 0 < wide < 10
        assert one.gap < 1e-6


def test_dots_are_each_dot():
    generator = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator))] * 2
    assert dots(pairs) == [dot({"x": a}, {"x": b}) for a, b in pairs]


def test_analyze_step_refuses_a_cut_model():
    policy = Lockstep()
    with pytest.raises(ValueError, match=r"A Lockstep in analyze_step; expected a whole model"):
        analyze_step(policy, adam(policy), policy.update_batch(seed=1), policy.draw(seed=2))


# Real models, cut over real ranks.

ONE_PROCESS = {"float64": 1e-10, "float32": 1e-6}
"""Relative to the largest. Differences magnify the last digit of P g_H, by how much depends on the
model: it was 3e-4 of a token's influence on the embedded policy, 3e-9 on the tiny adapter here."""
SAME_BITS = 1e-12
SUM_RULE = {"float64": 1e-8, "float32": 1e-3}
"""Of the sum of |influences|: truncation of the differences, and rounding."""
KINDS = {"full, fp64": "float64", "full, fp32": "float32", "LoRA, fp32": "float32"}


def batch_of() -> UpdateBatch:
    rollouts = tiny_rollouts(seed=5, prompts=(2, 4, 4, 3, 5), responses=(3, 6, 2, 5, 4))
    rollouts = replace(rollouts, prompt_N=torch.tensor([0, 0, 0, 1, 1]))
    reward_N = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    advantage_N = advantages_by_prompt("group")(reward_N, rollouts.prompt_N).double()
    advantage_NS = advantage_N[:, None].expand(rollouts.tokens_NS.shape)
    return UpdateBatch(rollouts=rollouts, advantage_NS=advantage_NS, reward_N=reward_N)


def model_study(policy: Any, optimizer: OptimizerState) -> dict[str, Any]:
    evaluation = tiny_rollouts(prompts=(3, 9, 5, 4, 4, 6, 3), responses=(4, 7, 2, 3, 5, 6, 4))
    estimator = EstimatorOptions(mode="central", microbatch=MICROBATCH, repackings=0)
    options = StepOptions(
        objective=Objective(entropy_coef=0.01), max_grad_norm=0.05, estimator=estimator
    )
    step = step_inputs(policy, optimizer, batch_of(), options)
    out = studied(step, evaluation, rewards(evaluation))
    influence = out.pop("influence")
    widths = [(one.forwards, one.length) for one in influence.differences]
    return {
        **out,
        **by_tokens(influence),
        "closes": influence.closes,
        "doubts": list(influence.doubts),
        "widths": widths,
        "sum rule": influence.sum_rule_gap,
    }


def on_shards(kinds: list[str]) -> dict[str, Any]:
    ranks, out = Ranks.all(), {}
    for kind in kinds:
        model = _model(kind)
        trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        with across(ranks):
            sharded = ShardedModel(model, ranks)
            policy = ShardedPolicy(sharded)
            out[kind] = model_study(policy, sharded.cut_state(_state(trained)))
    return out


@pytest.mark.slow
@pytest.mark.invariant
@pytest.mark.parametrize(
    ("size", "kinds"), [(2, list(KINDS)), (3, ["full, fp64", "LoRA, fp32"])], ids=["two", "three"]
)
def test_ranks_give_the_influence_of_one_process(size, kinds):
    """A width of 49 and adapters of rank 3 are cut unevenly; 5 and 7 rollouts leave ranks idle."""
    everyone = on_ranks(size, on_shards, kinds)
    for kind in kinds:
        policy, dtype = SequenceProcessor(_model(kind)), KINDS[kind]
        alone = model_study(policy, _state(policy.params))
        assert alone["closes"]
        for cut in (out[kind] for out in everyone):
            assert cut["closes"]
            assert cut["doubts"] == alone["doubts"] == []
            gaps = {
                name: gap(alone[name], cut[name])
                for name in alone
                if name not in ("closes", "doubts", "widths", "sum rule")
            }
            assert max(gaps.values()) < ONE_PROCESS[dtype], (kind, gaps)
            assert gaps["tokens"] < SAME_BITS, kind
            assert [n for n, _ in cut["widths"]] == [n for n, _ in alone["widths"]]
            assert cut["sum rule"] < SUM_RULE[dtype]


def rounded_gradients() -> float:
    """As FSDP itself would give them: summed in fp32, and rounded once more."""
    ranks = Ranks.all()
    model = _model("LoRA, fp32")
    trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    with across(ranks):
        sharded = ShardedModel(model, ranks)
        sharded._unrounded = lambda name, shard: shard.grad  # type: ignore[method-assign]
        cut = model_study(ShardedPolicy(sharded), sharded.cut_state(_state(trained)))
    policy = SequenceProcessor(_model("LoRA, fp32"))
    alone = model_study(policy, _state(policy.params))
    return gap(alone["tokens"], cut["tokens"])


@pytest.mark.slow
def test_the_last_digit_of_a_gradient_matters():
    """Teeth of the test above: what FSDP rounds is seen in the tokens' influences."""
    for apart in on_ranks(2, rounded_gradients):
        assert apart > SAME_BITS
