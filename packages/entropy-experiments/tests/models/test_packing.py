"""Padding side and amount, order, microbatch and chunk size change nothing (hypothesis)."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from entropy_experiments import (
    Objective,
    Rollouts,
    UpdateBatch,
    curvature,
    entropy_level,
    first_order,
    measured,
)
from entropy_experiments.update.gradient import loss_gradient
from oracles.cases import arbitrary_weights, case, random_direction
from oracles.transformer import TransformerPolicy
from tolerances import INVARIANT, assert_close

pytestmark = pytest.mark.invariant

COMMON = {"prompts": "fixed", "repackings": 0}
QUICK = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

packing = st.fixed_dictionaries(
    {
        "left": st.integers(0, 9),
        "right": st.integers(0, 9),
        "junk": st.integers(0, 4),
        "order": st.integers(0, 2**31),
        "microbatch": st.integers(1, 80),
        "chunk": st.none() | st.integers(1, 50),
    }
)


@pytest.fixture(scope="module")
def oracle():
    found = case("transformer", 5, 0.7)
    return found.policy, arbitrary_weights(found.rollouts, 5), found.direction


def repack(rollouts, how):
    generator = torch.Generator().manual_seed(how["order"])
    rows_N = torch.randperm(len(rollouts), generator=generator)
    # Padding tokens are whatever they are: a model must not look at them.
    return rollouts.take(rows_N).padded(how["left"], how["right"], token=how["junk"]), rows_N


def numbers(policy, rollouts, direction, microbatch):
    common = {**COMMON, "microbatch": microbatch}
    yield entropy_level(policy, rollouts, prompts="fixed", microbatch=microbatch)
    for form in ("matched", "to_go"):
        yield first_order(policy, rollouts, direction, form=form, **common)
    yield first_order(policy, rollouts, direction, mode="reverse", **common)
    yield first_order(policy, rollouts, direction, baseline=True, **common)
    for form in ("snis", "per_decision"):
        yield measured(policy, rollouts, direction, 0.1, form=form, **common)


@QUICK
@given(how=packing)
@pytest.mark.slow
def test_estimates(oracle, how):
    policy, rollouts, direction = oracle
    before = list(numbers(policy, rollouts, direction, 64))
    packed, _ = repack(rollouts, how)
    chunked = TransformerPolicy(5, temperature=0.7)
    chunked.chunk = how["chunk"]
    after = list(numbers(chunked, packed, direction, how["microbatch"]))
    for a, b in zip(after, before):
        assert_close(a.value, b.value, INVARIANT)
        if b.stderr is not None:
            assert_close(a.stderr, b.stderr, 1e3 * INVARIANT)  # a root of squared differences


@QUICK
@given(how=packing)
def test_weight_diagnostics(oracle, how):
    policy, rollouts, direction = oracle
    packed, rows_N = repack(rollouts, how)
    for form in ("snis", "per_decision"):
        a, b = (
            measured(policy, r, direction, 0.1, form=form, **COMMON).diagnostics
            for r in (packed, rollouts)
        )
        assert_close(a["weights"].ess, b["weights"].ess, INVARIANT)
        assert_close(a["weights"].kl, b["weights"].kl, INVARIANT)
        for name in ("integrand_N", "entropy_N", "entropy_base_N"):
            assert torch.allclose(a[name], b[name][rows_N], rtol=1e-10, atol=1e-13), name
        assert torch.equal(a["tokens_N"], b["tokens_N"][rows_N])


@QUICK
@given(how=packing)
@pytest.mark.slow
def test_curvature(oracle, how):
    """Differences divide rounding by the step: 1e-12 becomes 1e-9."""
    policy, rollouts, direction = oracle
    packed, _ = repack(rollouts, how)
    a, b = (
        curvature(policy, r, direction, microbatch=m, **COMMON)
        for r, m in ((packed, how["microbatch"]), (rollouts, 64))
    )
    assert_close(a.value, b.value, 1e3 * INVARIANT)


@pytest.mark.slow
@QUICK
@given(how=packing)
def test_loss_gradient(oracle, how):
    """Normalisers are those of the whole batch, however it is cut up."""
    policy, rollouts, _ = oracle
    generator = torch.Generator().manual_seed(0)

    def draw():
        return torch.randn(rollouts.tokens_NS.shape, generator=generator, dtype=torch.float64)

    batch = UpdateBatch(
        rollouts=rollouts,
        advantage_NS=draw(),
        old_logprob_NS=policy.score(policy.params, rollouts).logprob_NS + 0.2 * draw(),
        ref_logprob_NS=draw(),
        microbatch_N=torch.arange(len(rollouts)) % 3,
    )
    packed, rows_N = repack(rollouts, how)

    def widen(x_NS):
        # NaN in the padding must not reach a number.
        return torch.nn.functional.pad(x_NS[rows_N], (how["left"], how["right"]), value=torch.nan)

    moved = UpdateBatch(
        rollouts=packed,
        advantage_NS=widen(batch.advantage_NS),
        old_logprob_NS=widen(batch.old_logprob_NS),
        ref_logprob_NS=widen(batch.ref_logprob_NS),
        microbatch_N=batch.microbatch_N[rows_N],
    )
    for loss in ("reinforce", "grpo", "bnpo", "dr_grpo", "dapo"):
        objective = Objective(loss=loss, beta=0.1, entropy_coef=0.05, max_completion_length=9)
        a = loss_gradient(policy, moved, objective, microbatch=how["microbatch"])
        b = loss_gradient(policy, batch, objective, microbatch=64)
        assert_close(a.loss, b.loss, INVARIANT)
        for name, g in b.gradient.items():
            assert torch.allclose(a.gradient[name], g, rtol=1e-9, atol=1e-13), (loss, name)


def test_prompts_of_very_different_lengths():
    """Report 000: a left-padded batch with prompts of 3 and 40 tokens, against one at a time."""
    policy = TransformerPolicy(0, prompts=21)  # room for 44 positions
    generator = torch.Generator().manual_seed(0)
    direction = random_direction(policy, 0)
    alone = []
    for prompt, length in enumerate((3, 40, 3, 40)):
        tokens = torch.randint(3, 24, (length,), generator=generator).tolist()
        response = torch.randint(0, 3, (1 + prompt,), generator=generator).tolist()
        row = torch.tensor([tokens + response])
        mask = torch.tensor([[False] * length + [True] * len(response)])
        alone.append(
            Rollouts(
                tokens_NS=row,
                attention_NS=torch.ones_like(mask),
                response_NS=mask,
                prompt_N=torch.tensor([prompt]),
            )
        )
    width = max(r.tokens_NS.shape[1] for r in alone)
    wide = [r.padded(width - r.tokens_NS.shape[1], 0) for r in alone]
    together = Rollouts(
        tokens_NS=torch.cat([r.tokens_NS for r in wide]),
        attention_NS=torch.cat([r.attention_NS for r in wide]),
        response_NS=torch.cat([r.response_NS for r in wide]),
        prompt_N=torch.arange(4),
    )
    scores = policy.score(policy.params, together)
    for i, one in enumerate(alone):
        single = policy.score(policy.params, one)
        n = one.tokens_NS.shape[1]
        for got, want in zip(scores, single):
            assert torch.allclose(got[i, -n:], want[0], rtol=1e-12, atol=1e-13)
    for mode in ("jvp", "reverse"):
        slope = first_order(policy, together, direction, mode=mode, **COMMON).value
        parts = [first_order(policy, one, direction, unit="sequence", **COMMON) for one in alone]
        whole = first_order(policy, together, direction, unit="sequence", mode=mode, **COMMON)
        assert_close(whole.value, sum(p.value for p in parts) / 4, INVARIANT)
        assert abs(slope) > 1e-6


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
)
def test_any_lengths_go_through_every_stage(lengths, seed):
    """Report 001: prompt and response lengths of every kind in one buffer."""
    policy = TransformerPolicy(1, prompts=18)
    generator = torch.Generator().manual_seed(seed)
    width = max(p + r for p, r in lengths)
    tokens_NS = torch.randint(0, 3, (len(lengths), width), generator=generator)
    attention_NS = torch.stack([torch.arange(width) < p + r for p, r in lengths])
    response_NS = torch.stack(
        [(torch.arange(width) >= p) & (torch.arange(width) < p + r) for p, r in lengths]
    )
    rollouts = Rollouts(
        tokens_NS=tokens_NS,
        attention_NS=attention_NS,
        response_NS=response_NS,
        prompt_N=torch.arange(len(lengths)),
    )
    direction = random_direction(policy, 1)
    forward, reverse = (
        first_order(policy, rollouts, direction, mode=mode, **COMMON) for mode in ("jvp", "reverse")
    )
    assert forward.diagnostics["tokens_N"].tolist() == [r for _, r in lengths]
    assert_close(forward.value, reverse.value, 1e3 * INVARIANT)
    eta = 1e-5
    change = measured(policy, rollouts, direction, eta, **COMMON)
    assert_close(change.value / eta, forward.value, 1e-2)
    batch = UpdateBatch(
        rollouts=rollouts, advantage_NS=torch.ones(rollouts.tokens_NS.shape, dtype=torch.float64)
    )
    found = loss_gradient(policy, batch, Objective(loss="reinforce"))
    scores = policy.score(policy.params, rollouts)
    assert_close(found.loss, -float(scores.logprob_NS.sum()) / len(lengths), INVARIANT)


def test_doubling_the_batch_changes_nothing(oracle):
    """Report 001: a sum in place of a mean would double."""
    policy, rollouts, direction = oracle
    twice = rollouts.take(torch.arange(len(rollouts)).repeat(2))
    twice = replace(twice, weight_N=twice.weight_N / twice.share, share=1.0)
    for a, b in zip(
        numbers(policy, twice, direction, 64), numbers(policy, rollouts, direction, 64)
    ):
        assert_close(a.value, b.value, 1e2 * INVARIANT)
