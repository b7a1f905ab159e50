"""Responses of 1 to 200 tokens in one buffer, gradient checkpointing on (document 001, 1 and 2).

The probe's numbers are those of the rollouts taken one by one, without a batch or a padding token:
plain calls of the model, plain loops over tokens, in fp64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from entropy_experiments.models.precision import true_float64
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.online.evaluation_rollouts import Fixed
from entropy_experiments.online.probe import OnlineProbe, named_gradients
from entropy_experiments.online.rows import row_of
from entropy_experiments.online.trl import EntropyProbeCallback
from entropy_experiments.types import Rollouts
from oracles.tiny_grpo import grpo
from oracles.tiny_models import tiny_lora, tiny_rollouts
from tolerances import EXACT, assert_close

pytestmark = pytest.mark.naive

LENGTHS = range(1, 201)


def all_lengths(step: int = 1) -> Rollouts:
    """A response of each length, short and long ones mixed, to prompts of 1 to 13 tokens."""
    order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(0)).tolist()
    responses = tuple(LENGTHS[i] for i in order[::step])
    prompts = tuple(1 + 7 * i % 13 for i in range(len(responses)))
    return tiny_rollouts(prompts=prompts, responses=responses)


def _checkpointed(reentrant: bool) -> Any:
    model: Any = true_float64(tiny_lora())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model.train()


def _one_by_one(rollouts: Rollouts) -> list[tuple[Tensor, int]]:
    """(tokens, where the response begins), without padding."""
    out = []
    for row in range(len(rollouts)):
        inside = rollouts.attention_NS[row]
        prompt = int((inside & ~rollouts.response_NS[row]).sum())
        out.append((rollouts.tokens_NS[row][inside], prompt))
    return out


def _scores(model: Any, params: Any, tokens: Tensor, prompt: int) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of one response."""
    with sdpa_kernel(SDPBackend.MATH):
        logits = functional_call(model, params, (), {"input_ids": tokens[None]}).logits[0]
    law = logits[prompt - 1 : -1].log_softmax(-1)
    return law.gather(1, tokens[prompt:, None])[:, 0], -(law.exp() * law).sum(-1)


def _by_loops(
    model: Any, before: Any, after: Any, v: Any, rollouts: Rollouts
) -> tuple[float, float, float]:
    """(H, its slope along v, its measured change) as docs/theory.md writes them."""
    found, moved = [], []
    for tokens, prompt in _one_by_one(rollouts):

        def at(params: Any) -> tuple[Tensor, Tensor]:
            return _scores(model, params, tokens, prompt)

        with torch.no_grad():
            found.append(jvp(at, (before,), (v,)))
            moved.append(at(after))
    count = sum(len(h) for (_, h), _ in found)
    level = float(sum(h.sum() for (_, h), _ in found)) / count
    slope = top = bottom = 0.0
    for ((old, h), (dl, dh)), (new, h_after) in zip(found, moved, strict=True):
        weight = 1.0
        for k in range(len(h)):
            to_go = float((h[k + 1 :] - level).sum())
            slope += float(dh[k]) + to_go * float(dl[k])
            top += weight * float(h_after[k])
            bottom += weight
            weight *= float((new[k] - old[k]).exp())
    return level, slope / count, top / bottom - level


@pytest.mark.parametrize(
    ("reentrant", "step"),
    [
        (True, 10),  # some of them, soon
        pytest.param(True, 1, marks=pytest.mark.slow),
        pytest.param(False, 1, marks=pytest.mark.slow),
    ],
)
def test_a_buffer_of_all_lengths_is_its_rollouts_one_by_one(reentrant, step):
    model, rollouts = _checkpointed(reentrant), all_lengths(step)
    assert step > 1 or sorted(rollouts.tokens_N.tolist()) == list(LENGTHS)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    part = all_lengths(step=40)
    logits = model(input_ids=part.tokens_NS, attention_mask=part.attention_NS.long()).logits
    logits.log_softmax(-1)[part.response_NS].square().mean().backward()
    gradient = named_gradients(model)
    assert all(g is not None and g.abs().sum() > 0 for g in gradient.values())  # not one is None

    plain: Any = true_float64(tiny_lora())  # the same weights, never checkpointed
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    probe = OnlineProbe(SequenceProcessor(model), Fixed(rollouts), microbatch=8, order=2)
    prediction = probe.before_step(gradient, optimizer)
    optimizer.step()
    found = probe.after_step()
    after = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    v = {name: (after[name] - old) / prediction.lr for name, old in before.items()}

    level, slope, change = _by_loops(plain, before, after, v, rollouts)
    assert_close(prediction.entropy.value, level, EXACT)
    assert_close(prediction.change.value, prediction.lr * slope, EXACT)
    assert_close(found.change.value, change, EXACT)
    assert abs(change) > 1e-5  # there was something to get wrong
    row = row_of(found, step=0, probed_steps=1, overhead=0.0)
    # Of weights so even that their tail says nothing, and of a slope that may be 0.
    allowed = {"k_hat", "linear_range"}
    assert {name for name, value in row.items() if value is None} <= allowed

    # Teeth: the last token of one response, cut off, is seen.
    last = int(rollouts.response_NS[0].nonzero()[-1])
    inside_NS = rollouts.attention_NS.clone()
    inside_NS[0, last] = False
    cut = replace(rollouts, attention_NS=inside_NS, response_NS=rollouts.response_NS & inside_NS)
    h_NS = SequenceProcessor(plain).score_all(cut).entropy_NS
    assert abs(float(h_NS.sum() / cut.tokens_N.sum()) - level) > 100 * EXACT


@pytest.mark.parametrize("reentrant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_same_buffer_inside_grpo(reentrant, tmp_path):
    """Nothing crashes, nothing is None."""
    callback = EntropyProbeCallback(max_overhead=None, evaluation=all_lengths(), order=2)
    with torch.random.fork_rng(devices=[]):
        trainer = grpo(
            tmp_path,
            callbacks=[callback],
            max_steps=1,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        trainer.train()
    assert callback.off is None
    assert [row["rollouts"] for row in callback.rows] == [200]
    for row in callback.rows:
        assert row["step_mismatch"] < 1e-3
        missing = {name for name, value in row.items() if value is None}
        assert missing <= {"k_hat", "baseline_share", "linear_range"}
