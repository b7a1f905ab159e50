"""Attention by segments gives the numbers and derivatives of the square, and of rows alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.func import jvp

from entropy_experiments.models import scoring, shared_prompts
from entropy_experiments.models.precision import true_float64
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.models.shared_prompts import Rows, Segments, shared_rows
from entropy_experiments.numerics.derivatives import pullback, pushforward, pushforwards
from models.test_scoring import direction, made
from models.test_shared_prompts import groups
from oracles.tiny_models import tiny_lora, tiny_model
from tolerances import EXACT, INVARIANT

pytestmark = pytest.mark.naive

LAYERS = 2
SIZES = {
    "one prompt": {9: (5, 8, 3)},
    "several": {6: (3, 1, 9, 4), 2: (7, 7), 11: (5,)},
    "responses of one token": {4: (1, 1, 6), 5: (1, 1)},
    "a prompt of one token": {1: (4, 9, 2)},
    "very different": {1: (2, 1, 60), 50: (1, 3, 3), 7: (5, 30)},
}
"""Lengths of responses by the length of their prompt."""
MODELS = {
    "gpt2": lambda: tiny_model("gpt2"),
    "qwen2": lambda: tiny_model("qwen2"),  # two heads of queries to one of keys
    "lora": lambda: tiny_lora("llama"),
}


@cache
def exact(name: str) -> SequenceProcessor:
    return SequenceProcessor(true_float64(MODELS[name]()))


def rows_of(name: str) -> Rows:
    rows = shared_rows(groups(sizes=SIZES[name]))
    assert rows is not None
    return rows


@pytest.fixture
def taken(monkeypatch) -> list[int]:
    """Layers that went by segments."""
    found, own = [], Segments.attended

    def spy(self, *args, **kwargs):
        found.append(len(self.parts))
        return own(self, *args, **kwargs)

    monkeypatch.setattr(Segments, "attended", spy)
    return found


@pytest.mark.parametrize("call", [0, shared_prompts.CALL])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_rows_alone(name, sizes, call, taken, monkeypatch):
    monkeypatch.setattr(shared_prompts, "CALL", call)
    policy, rollouts = exact(name), groups(sizes=SIZES[sizes])
    assert policy.shares_prompts
    taken.clear()
    with torch.no_grad():
        got = policy.score(policy.params, rollouts)
    assert len(taken) == LAYERS
    assert call or max(taken) > 1 or sizes == "responses of one token"
    expected = policy.without_sharing().score(policy.params, rollouts)
    assert len(taken) == LAYERS
    for ours, theirs in zip(got, expected, strict=True):
        assert float((ours - theirs).abs().max()) <= INVARIANT


@pytest.mark.parametrize("sizes", ["several", "very different"])
@pytest.mark.parametrize("name", MODELS)
def test_derivatives_are_those_of_rows_alone(name, sizes, taken):
    policy, rollouts = exact(name), groups(sizes=SIZES[sizes])
    alone, v = policy.without_sharing(), direction(policy)

    def along(of, how):
        return pushforward(lambda p: of.score(p, rollouts), of.params, v, how=how)[1]

    expected = along(alone, "jvp")
    _, (one, half) = pushforwards(
        lambda p: policy.score(p, rollouts),
        policy.params,
        [v, {key: x / 2 for key, x in v.items()}],
    )
    assert taken
    for found in (along(policy, "jvp"), along(policy, "double_backward"), one):
        for ours, theirs in zip(found, expected, strict=True):
            assert float((ours - theirs).norm()) <= EXACT * float(theirs.norm())
    for ours, theirs in zip(half, expected, strict=True):
        assert float((2 * ours - theirs).norm()) <= EXACT * float(theirs.norm())

    def gradient(of):
        return pullback(lambda p: sum(x.square().sum() for x in of.score(p, rollouts)), of.params)

    (value, ours), (wanted, theirs) = gradient(policy), gradient(alone)
    assert float(value) == pytest.approx(float(wanted), rel=EXACT)
    for key, grad in theirs.items():
        assert float((ours[key] - grad).norm()) <= EXACT * (1 + float(grad.norm()))


def test_a_recorded_graph_goes_by_the_square(taken):
    """As a trainer's own; recomputed layers, too."""
    policy = SequenceProcessor(true_float64(tiny_model("qwen2")), checkpointing=True)
    rollouts = groups()
    taken.clear()

    def gradient(of):
        return pullback(lambda p: of.score(p, rollouts).entropy_NS.sum(), of.params)[1]

    ours, theirs = gradient(policy), gradient(policy.without_sharing())
    assert not taken
    for key, grad in theirs.items():
        assert float((ours[key] - grad).norm()) <= EXACT * (1 + float(grad.norm()))


def test_rows_are_chosen_for_the_attention_that_they_get(monkeypatch):
    """What is worth sharing by segments may not be by the square."""
    policy, rollouts = exact("qwen2"), groups()
    asked, own = [], scoring.shared_rows

    def spy(*args, square):
        asked.append(square)
        return own(*args, square=square)

    monkeypatch.setattr(scoring, "shared_rows", spy)

    def score(p):
        return policy.score(p, rollouts).entropy_NS.sum()

    pullback(score, policy.params)
    pushforward(score, policy.params, direction(policy))
    policy.score_all(rollouts, microbatch=len(rollouts))
    assert asked == [True, False, False]


def test_responses_that_see_each_other_are_noticed(monkeypatch):
    """The teeth of all of the above: a part whose keys are those of the next response."""
    policy, rollouts = exact("gpt2"), groups()
    part = shared_prompts._part

    def another(responses, width):
        right = part(responses, width)
        return shared_prompts.Part(
            query_ML=right.query_ML, key_MK=right.key_MK.roll(1, 0), looks_MLK=right.looks_MLK
        )

    monkeypatch.setattr(shared_prompts, "_part", another)
    with torch.no_grad():
        wrong = policy.score(policy.params, rollouts)
        right = policy.without_sharing().score(policy.params, rollouts)
    assert float((wrong.logprob_NS - right.logprob_NS).abs().max()) > 1e-3


def test_the_square_is_never_made(monkeypatch, taken):
    def refuse(segment_RS):
        raise AssertionError(f"a square of {segment_RS.shape}")

    policy = SequenceProcessor(made("qwen2"))
    monkeypatch.setattr(shared_prompts, "_looks", refuse)
    with torch.no_grad():
        policy.score(policy.params, groups())
    assert taken
    mode = rows_of("several").by_segments()
    assert mode.mask.untyped_storage().nbytes() == 1


def test_half_precision_stays_near():
    """As near as rows alone are to fp32."""
    policy = SequenceProcessor(tiny_model("llama").bfloat16())
    assert policy.shares_prompts
    exactly = exact_llama().score(exact_llama().params, groups())
    gaps = []
    for of in (policy, policy.without_sharing()):
        got = of.score(of.params, groups())
        _, slope = pushforward(lambda p, of=of: of.score(p, groups()), of.params, direction(of))
        assert all(bool(x.isfinite().all()) for x in (*got, *slope))
        gaps.append(float((got.logprob_NS - exactly.logprob_NS).abs().mean()))
    assert gaps[0] <= 1.5 * gaps[1]


@cache
def exact_llama() -> SequenceProcessor:
    return SequenceProcessor(true_float64(tiny_model("llama").bfloat16()))


def drawn(rows: Rows, *heads_and_sizes: tuple[int, int]) -> list[Tensor]:
    """Of every pair a [R, H, S, D], laid out as models do."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(*rows.tokens_RS.shape, *pair, generator=generator).double().transpose(1, 2)
        for pair in heads_and_sizes
    ]


attend = nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize("call", [0, shared_prompts.CALL])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("grad", [False, True])
def test_it_is_the_attention_of_the_square(sizes, grad, call, monkeypatch):
    """Fewer heads of keys, a width of values of their own, another scale."""
    monkeypatch.setattr(shared_prompts, "CALL", call)
    rows = rows_of(sizes)
    query, key, value = drawn(rows, (6, 4), (3, 4), (3, 5))
    options = {"scale": 0.3, "enable_gqa": True}
    expected = attend(query, key, value, attn_mask=rows.looks_R1SS, **options)
    with torch.set_grad_enabled(grad), rows.by_segments() as mode:
        got = attend(query, key, value, attn_mask=mode.mask, **options)
    real_RS = rows.segment_RS >= 0
    assert float((got - expected).transpose(1, 2)[real_RS].abs().max()) <= INVARIANT
    assert bool(got.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_precision_comes_back_as_it_went(dtype):
    rows = rows_of("several")
    query, key, value = (x.to(dtype) for x in drawn(rows, (2, 4), (2, 4), (2, 4)))
    expected = attend(*(x.double() for x in (query, key, value)), attn_mask=rows.looks_R1SS)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), rows.by_segments() as mode:
            got = attend(query, key, value, attn_mask=mode.mask)
        assert got.dtype == dtype
        gap = (got - expected).transpose(1, 2)[rows.segment_RS >= 0].abs().max()
        assert float(gap) <= 4 * torch.finfo(dtype).eps


def test_autocast_does_not_halve_the_precision_of_differentiated_attention():
    rows = rows_of("several")
    one, along = drawn(rows, (2, 4), (2, 4))
    one, along = one.float(), along.float()

    def slope():
        with torch.no_grad(), rows.by_segments() as mode:
            return jvp(lambda x: attend(x, x, x, attn_mask=mode.mask), (one,), (along,))[1]

    expected = slope()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(slope(), expected)


def test_padding_has_finite_derivatives():
    rows = rows_of("very different")
    assert bool((rows.segment_RS < 0).any())
    inputs = [100 * x for x in drawn(rows, (2, 4), (2, 4), (2, 3))]

    def attended(*three):
        with rows.by_segments() as mode:
            return attend(*three, attn_mask=mode.mask)

    _, slope = jvp(attended, tuple(inputs), tuple(torch.ones_like(x) for x in inputs))
    leaves = [x.requires_grad_() for x in inputs]
    grads = torch.autograd.grad(attended(*leaves).square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
    assert all(bool(x.isfinite().all()) for x in (slope, *grads, *second))


def test_whatever_else_is_done_with_the_mask_is_done_with_the_square(taken):
    rows = rows_of("several")
    query, key, value = drawn(rows, (2, 4), (2, 4), (2, 4))
    with rows.by_segments() as mode:
        assert mode.mask.shape == rows.looks_R1SS.shape
        assert mode.mask.dtype == torch.bool
        assert torch.equal(mode.mask[..., 1:], rows.looks_R1SS[..., 1:])
        assert torch.equal(torch.cat([mode.mask, mode.mask]), rows.looks_R1SS.repeat(2, 1, 1, 1))
        sliced = attend(query, key, value, attn_mask=mode.mask[:, :, :, : key.shape[2]])
        narrow = attend(query[:, :, 3:], key, value, attn_mask=mode.mask[:, :, 3:])
        flat = attend(query[0], key[0], value[0], mode.mask[0])
        plain = attend(query, key, value, is_causal=True)
        torch.manual_seed(0)
        dropped = attend(query, key, value, mode.mask, 0.5)
    assert not taken
    square = attend(query, key, value, attn_mask=rows.looks_R1SS)
    assert torch.equal(sliced, square)
    assert float((narrow - square[:, :, 3:]).abs().max()) <= INVARIANT
    assert float((flat - square[0]).abs().max()) <= INVARIANT
    assert torch.equal(plain, attend(query, key, value, is_causal=True))
    torch.manual_seed(0)
    assert torch.equal(dropped, attend(query, key, value, rows.looks_R1SS, 0.5))


def test_fewer_pairs_than_the_square():
    """Eight responses of 20 to 63 tokens to a prompt of 60, in two parts."""
    sizes = {60: (21, 27, 33, 39, 46, 52, 58, 64)}
    rows = shared_rows(groups(sizes=sizes))
    assert rows is not None
    assert rows.segments.pairs < 0.4 * rows.tokens_RS.shape[1] ** 2
    assert len(rows.segments.parts) == 2


def test_one_long_response_is_not_what_all_are_padded_to():
    rows = shared_rows(groups(sizes={10: (1001, *[11] * 15)}))
    assert rows is not None
    longest, short = rows.segments.parts
    assert longest.query_ML.shape == (1, 1000)
    assert short.query_ML.shape == (15, 10)


def test_rows_are_about_as_wide_as_each_other():
    """A group of eight beside groups of two is divided, or the others would be padding mostly."""
    sizes = {10: (40,) * 8, **{12 + i: (40, 40) for i in range(4)}}
    rows = shared_rows(groups(sizes=sizes))
    assert rows is not None
    assert len(rows.tokens_RS) == 4 + 4
    together = [len(lengths) for _, lengths in rows.sizes]
    assert together == [2] * 8
    alone = shared_rows(groups(sizes={10: (40,) * 8}))
    assert alone is not None
    assert len(alone.tokens_RS) == 1  # by segments a long row costs no more than a short one
