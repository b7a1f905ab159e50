"""Document 000: prompts of 3 and 40 tokens in one left-padded batch, against one prompt at a time.

The reference never sees padding: each rollout is scored alone, as a row without a spare column, and
the numbers are put together by the formulas, in loops.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from entropy_experiments import Objective, UpdateBatch, first_order, loss_gradient, measured
from entropy_experiments.estimate.gradient import entropy_gradient
from entropy_experiments.estimate.options import slope_estimand
from entropy_experiments.models.precision import true_float64
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.derivatives import dot, norm
from entropy_experiments.types import Rollouts
from oracles.cases import random_direction
from oracles.tiny_models import PAD, tiny_model, tiny_rollouts
from tolerances import EXACT, assert_exact

pytestmark = pytest.mark.naive

PROMPTS, RESPONSES = (3, 40, 3, 17, 40, 9), (5, 9, 2, 7, 1, 4)
LEFT = max(PROMPTS)
FORMS = ("matched", "to_go")
ETA = 0.05


def batch() -> Rollouts:
    return tiny_rollouts(prompts=PROMPTS, responses=RESPONSES)


@cache
def policy() -> SequenceProcessor:
    return SequenceProcessor(true_float64(tiny_model("qwen2")), temperature=0.8)


@cache
def direction():
    return random_direction(policy(), 3, size=0.02)


def alone(i: int) -> Rollouts:
    """Rollout i by itself: its own tokens, nothing else."""
    whole = batch()
    tokens_S = whole.tokens_NS[i][whole.attention_NS[i]]
    response_S = torch.arange(len(tokens_S)) >= PROMPTS[i]
    return Rollouts(
        tokens_NS=tokens_S[None],
        attention_NS=torch.ones_like(tokens_S, dtype=torch.bool)[None],
        response_NS=response_S[None],
        prompt_N=torch.tensor([i]),
    )


def scores_alone(params, i: int):
    """(log-probs, entropies) of rollout i's tokens, as two vectors."""
    one = alone(i)
    logprob_NS, entropy_NS = policy().score(params, one)
    return logprob_NS[one.response_NS], entropy_NS[one.response_NS]


@cache
def base():
    with torch.no_grad():
        return [scores_alone(policy().params, i) for i in range(len(PROMPTS))]


@cache
def slopes():
    params, v = dict(policy().params), dict(direction().total)
    return [
        torch.func.jvp(lambda p: scores_alone(p, i), (params,), (v,))[1]
        for i in range(len(PROMPTS))
    ]


def level() -> float:
    return sum(float(h.sum()) for _, h in base()) / sum(RESPONSES)


def cotangent(form: str, i: int) -> torch.Tensor:
    """What D l of each token of rollout i counts for in the state term."""
    h = base()[i][1] - level()
    if form == "matched":
        return h.sum().expand_as(h)
    return torch.tensor([float(h[k + 1 :].sum()) for k in range(len(h))], dtype=h.dtype)


def assembled_slope(form: str) -> float:
    total = sum(
        float(dh.sum() + (cotangent(form, i) * dl).sum()) for i, (dl, dh) in enumerate(slopes())
    )
    return total / sum(RESPONSES)


def assembled_gradient(weighted):
    """Gradient of the sum over rollouts of `weighted(i, l, h)`, each from its own forward."""
    params = {name: p.detach().requires_grad_() for name, p in policy().params.items()}
    found = {name: torch.zeros_like(p) for name, p in params.items()}
    for i in range(len(PROMPTS)):
        value = weighted(i, *scores_alone(params, i))
        for name, g in zip(found, torch.autograd.grad(value, list(params.values())), strict=True):
            found[name] += g
    return found


def assert_same_gradient(got, expected) -> None:
    gap = norm({name: got[name] - expected[name] for name in expected})
    assert gap <= EXACT * norm(expected), gap / norm(expected)


@pytest.mark.parametrize("microbatch", [1, 2, 8])
@pytest.mark.parametrize("mode", ["jvp", "double_backward", "reverse"])
@pytest.mark.parametrize("form", FORMS)
def test_the_x_phase(form, mode, microbatch):
    got = first_order(
        policy(), batch(), direction(), form=form, mode=mode, microbatch=microbatch, repackings=0
    )
    assert abs(got.value) > 1e-3
    assert_exact(got.value, assembled_slope(form))


@pytest.mark.parametrize("microbatch", [1, 8])
@pytest.mark.parametrize("form", FORMS)
def test_the_entropy_gradient(form, microbatch):
    got = entropy_gradient(
        policy(),
        batch(),
        estimand=slope_estimand(policy(), form=form),
        microbatch=microbatch,
    )
    expected = assembled_gradient(
        lambda i, logp, h: (h.sum() + (cotangent(form, i) * logp).sum()) / sum(RESPONSES)
    )
    assert_same_gradient(got, expected)
    assert_exact(dot(got, direction().total), assembled_slope(form))


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_the_loss_gradient(loss):
    advantage_N = torch.tensor([1.0, -0.5, 0.3, -1.2, 0.8, 0.1], dtype=torch.float64)
    rollouts = batch()
    update = UpdateBatch(
        rollouts=rollouts,
        advantage_NS=torch.where(rollouts.response_NS, advantage_N[:, None], 0.0),
    )
    got = loss_gradient(policy(), update, Objective(loss=loss), microbatch=8)

    def weighted(i, logp, _):
        tokens = sum(RESPONSES) if loss == "dapo" else len(PROMPTS) * RESPONSES[i]
        return -advantage_N[i] * logp.sum() / tokens

    assert_same_gradient(got.gradient, assembled_gradient(weighted))


@pytest.mark.parametrize("microbatch", [1, 8])
@pytest.mark.parametrize("form", ["snis", "per_decision"])
def test_the_measurement(form, microbatch):
    got = measured(
        policy(), batch(), direction(), ETA, form=form, microbatch=microbatch, repackings=0
    )
    moved = {name: p + ETA * direction().total[name] for name, p in policy().params.items()}
    top = bottom = 0.0
    with torch.no_grad():
        for i, (old_l, _) in enumerate(base()):
            new_l, new_h = scores_alone(moved, i)
            ratio = (new_l - old_l).tolist()
            for k, h in enumerate(new_h.tolist()):
                past = ratio if form == "snis" else ratio[:k]
                weight = float(torch.tensor(sum(past), dtype=torch.float64).exp())
                top, bottom = top + weight * h, bottom + weight
    assert abs(got.value) > 1e-4
    assert_exact(got.value, top / bottom - level())


def old_response_mask(rollouts: Rollouts, left: int) -> torch.Tensor:
    """The earlier code: length = tokens in the row minus the *padded* width of the prompts."""
    length_N = (rollouts.attention_NS.sum(1) - left).clamp(min=0)
    column_S = torch.arange(rollouts.tokens_NS.shape[1])
    return (column_S >= left) & (column_S < left + length_N[:, None])


def test_the_old_lengths_lose_whole_responses_and_are_refused():
    rollouts = batch()
    response_NS = old_response_mask(rollouts, LEFT)
    kept = response_NS.sum(1).tolist()
    assert kept == [0, 9, 0, 0, 1, 0]
    with pytest.raises(ValueError, match=r"Rollout 0 has an empty response \(4 of 6 do\).*padded"):
        Rollouts(
            tokens_NS=rollouts.tokens_NS,
            attention_NS=rollouts.attention_NS,
            response_NS=response_NS,
            prompt_N=rollouts.prompt_N,
        )


def test_the_old_lengths_cut_the_last_tokens_where_prompts_are_nearly_equal():
    """The silent half of the same bug: nothing is empty, and every number is another one."""
    rollouts = tiny_rollouts(prompts=(38, 40, 37), responses=(9, 9, 8))
    response_NS = old_response_mask(rollouts, 40)
    assert response_NS.sum(1).tolist() == [7, 9, 5]
    cut = Rollouts(
        tokens_NS=torch.where(rollouts.attention_NS, rollouts.tokens_NS, PAD),
        attention_NS=rollouts.attention_NS,
        response_NS=response_NS,
        prompt_N=rollouts.prompt_N,
    )
    right, wrong = (
        first_order(policy(), x, direction(), mode="reverse", repackings=0).value
        for x in (rollouts, cut)
    )
    assert abs(right - wrong) > 1e3 * EXACT * abs(right)
    assert abs(right - wrong) > 0.01 * abs(right)
