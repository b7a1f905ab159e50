"""Rotary factors that depend on the longest sequence of a call: each rollout gets its own.

The original context is 14 tokens; rollouts of 8 to 21 tokens, on both sides of it and at its edge.
"""

from __future__ import annotations

import pytest
import torch

from entropy_experiments.models.positions import Contexts
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.numerics.derivatives import dot, pullback, pushforward
from entropy_experiments.sampling.decode import Draw, LastLogits, decode
from entropy_experiments.types import Rollouts
from oracles.sweep import direction_of
from oracles.tiny_models import VOCABULARY, tiny_model
from tolerances import SCORES_FP32, SLOPES_FP32

pytestmark = pytest.mark.naive

ORIGINAL = 14
ROPES = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0, 5.0, 9.0, 17.0],
        "original_max_position_embeddings": ORIGINAL,
        "factor": 4.0,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
}
PROMPTS = (5, 5, 5, 5, 6, 6, 4, 16)
RESPONSES = (3, 16, 9, 10, 9, 8, 9, 3)


def long_model(rope: str):
    context = 48 if rope == "longrope" else ORIGINAL
    return tiny_model("llama", rope_parameters=ROPES[rope], max_position_embeddings=context)


def rollouts() -> Rollouts:
    """Four of one prompt, of 8, 21, 14 and 15 tokens; two of another, of 15 and 14; two alone."""
    draw = torch.Generator().manual_seed(3)
    n, left, right = len(PROMPTS), max(PROMPTS), max(RESPONSES)
    tokens_NS = torch.randint(3, VOCABULARY, (n, left + right), generator=draw)
    tokens_NS[1:4, :left], tokens_NS[5, :left] = tokens_NS[0, :left], tokens_NS[4, :left]
    column_S = torch.arange(left + right)
    start_N, stop_N = left - torch.tensor(PROMPTS), left + torch.tensor(RESPONSES)
    attention_NS = (column_S >= start_N[:, None]) & (column_S < stop_N[:, None])
    return Rollouts(
        tokens_NS=torch.where(attention_NS, tokens_NS, 0),
        attention_NS=attention_NS,
        response_NS=attention_NS & (column_S >= left),
        prompt_N=torch.tensor([0, 0, 0, 0, 1, 1, 2, 3]),
    )


def gap(policy: SequenceProcessor, rope: str) -> float:
    """A new model for every rollout: dynamic NTK remembers the longest that it has seen."""
    batch = rollouts()
    got = policy.score(policy.params, batch)
    worst = 0.0
    for n in range(len(batch)):
        tokens_S = batch.tokens_NS[n, batch.attention_NS[n]]
        with torch.no_grad():
            logp_SV = long_model(rope)(input_ids=tokens_S[None]).logits[0].double().log_softmax(-1)
        drawn_T = batch.response_NS[n].nonzero().flatten() - int(
            batch.attention_NS[n].int().argmax()
        )
        logprob_T = logp_SV[drawn_T - 1, tokens_S[drawn_T]]
        entropy_T = torch.special.entr(logp_SV[drawn_T - 1].exp()).sum(-1)
        for ours_NS, own_T in zip(got, (logprob_T, entropy_T), strict=True):
            ours_T = ours_NS[n, batch.response_NS[n]].double()
            worst = max(worst, float((ours_T - own_T).abs().max()))
    return worst


@pytest.mark.parametrize("rope", ROPES)
def test_every_rollout_has_its_own_factors(rope):
    policy = SequenceProcessor(long_model(rope))
    assert policy.shares_prompts
    assert policy.contexts.original == ORIGINAL
    assert gap(policy, rope) <= SCORES_FP32
    assert gap(policy, rope) <= SCORES_FP32  # and the longest of before is forgotten


@pytest.mark.parametrize("rope", ROPES)
def test_mixing_lengths_would_be_seen(rope):
    policy = SequenceProcessor(long_model(rope))
    policy.contexts = Contexts(rotary=())
    assert gap(policy, rope) > 100 * SCORES_FP32
    assert gap(policy.without_sharing(), rope) > 100 * SCORES_FP32


@pytest.mark.parametrize("rope", ROPES)
def test_slopes_by_both_modes_and_gradients_by_rollout(rope):
    policy, batch = SequenceProcessor(long_model(rope)), rollouts()
    v = direction_of(policy.model)

    def entropy(params):
        return policy.score(params, batch).entropy_NS.sum()

    _, slope = pushforward(entropy, policy.params, v)
    _, gradient = pullback(entropy, policy.params)
    assert dot(gradient, v) == pytest.approx(float(slope), rel=10 * SLOPES_FP32)
    alone = sum(
        float(
            pushforward(
                lambda p, row=n: policy.score(p, batch.take(torch.tensor([row]))).entropy_NS.sum(),
                policy.params,
                v,
            )[1]
        )
        for n in range(len(batch))
    )
    assert alone == pytest.approx(float(slope), rel=10 * SLOPES_FP32)


def test_the_model_is_left_as_it_was():
    model = long_model("dynamic")
    rotary = model.model.rotary_emb
    with torch.no_grad():
        model(input_ids=torch.arange(20)[None])
    before = rotary.inv_freq.clone(), int(rotary.max_seq_len_cached)
    policy = SequenceProcessor(model)
    policy.score(policy.params, rollouts())
    assert torch.equal(rotary.inv_freq, before[0])
    assert int(rotary.max_seq_len_cached) == before[1]


def drawn(rope: str, prompt: int, new: int) -> int:
    policy = SequenceProcessor(long_model(rope))
    with torch.no_grad():
        (one,) = decode(
            LastLogits(policy),
            [Draw(prompt=tuple(range(3, 3 + prompt)), seed=0)],
            temperature=1.0,
            top_p=1.0,
            max_new_tokens=new,
            ends=(),
            stops=None,
            report=lambda count: None,
        )
    return len(one.tokens)


def test_drawing_across_the_original_context_is_refused():
    assert drawn("longrope", 6, 8) == drawn("dynamic", 6, 8) == 8
    assert drawn("longrope", 15, 8) == 8  # one set of factors throughout
    for rope, prompt in (("longrope", 6), ("dynamic", 6), ("dynamic", 15)):
        with pytest.raises(ValueError, match="beyond the original context of 14 tokens"):
            drawn(rope, prompt, 9)
