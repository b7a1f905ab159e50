"""Sampling from a model cut over ranks: rank 0 draws, and all ranks go on with its tokens.

A rank whose draws are others (another CPU rounds in another way) would leave the decode loop
earlier than the rest, who wait for its share of a layer.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from entropy_experiments.distributed import RankError, Ranks, across, announced
from entropy_experiments.models.scoring import SequenceProcessor
from entropy_experiments.models.sharded import ShardedModel, ShardedPolicy
from entropy_experiments.sampling import decode as decoding
from entropy_experiments.sampling.datasets import Problem
from entropy_experiments.sampling.decode import Draw, Drawn, LastLogits, Step, decode
from entropy_experiments.sampling.generate import SampleGenerator, model_hash
from oracles.processes import on_ranks
from oracles.tiny_models import EOS, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.invariant

PROBLEMS = [Problem(id=f"p{i}", prompt="1+2"[: 1 + i % 3] + "=", answer="3") for i in range(5)]
LENGTH, STOP = 10, "never written"


def _generator(policy: Any) -> SampleGenerator:
    return SampleGenerator(
        policy, tiny_tokenizer(), max_new_tokens=LENGTH, stop=(STOP,), batch_size=3
    )


def _sampled(generator: SampleGenerator) -> list[Drawn]:
    """What this rank's own decode loop ended with, unit after unit."""
    kept: list[Drawn] = []
    own = generator._decode

    def keeping(*args: Any) -> list[Drawn]:
        kept.extend(found := own(*args))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "_decode", keeping)
        generator.generate_evaluation_batch(PROBLEMS)
    return kept


def _end_at_once(logits_NV: Any, uniform_N: Any, **_: Any) -> Any:
    return torch.full((len(uniform_N),), EOS), torch.zeros(len(uniform_N), dtype=torch.float64)


def _perturb(patch: pytest.MonkeyPatch, what: str) -> None:
    if what == "draws":
        patch.setattr(decoding, "inverse_cdf", _end_at_once)
    else:
        patch.setattr(SampleGenerator, "_stops", lambda *_: True)


def _one_rank_draws_otherwise() -> dict[str, list[Drawn]]:
    ranks, out = Ranks.all(), {}
    for what in ("draws", "stops"):
        generator = _generator(ShardedPolicy(ShardedModel(tiny_model("llama"), ranks)))
        with pytest.MonkeyPatch.context() as patch, across(ranks):
            if not ranks.first:
                _perturb(patch, what)
            out[what] = _sampled(generator)
    return out


@pytest.mark.slow
def test_all_ranks_go_on_with_the_tokens_of_rank_0():
    expected = _sampled(_generator(SequenceProcessor(tiny_model("llama"))))
    assert max(len(rollout.tokens) for rollout in expected) == LENGTH
    for found in on_ranks(2, _one_rank_draws_otherwise):
        assert found == {"draws": expected, "stops": expected}


@pytest.mark.parametrize("what", ["draws", "stops"])
def test_the_perturbation_has_teeth(monkeypatch, what):
    _perturb(monkeypatch, what)
    found = _sampled(_generator(SequenceProcessor(tiny_model("llama"))))
    assert {len(rollout.tokens) for rollout in found} == {1}


def _refuse(*_: Any, **__: Any) -> None:
    raise ValueError("The policy's logits are not finite")


def _rank_0_cannot_draw() -> list[str]:
    ranks = Ranks.all()
    policy = ShardedPolicy(ShardedModel(tiny_model("llama"), ranks))
    generator, said = _generator(policy), []
    with pytest.MonkeyPatch.context() as patch, across(ranks):
        if ranks.first:
            patch.setattr(decoding, "inverse_cdf", _refuse)
        for message in ("logits are not finite", "An earlier pass of the sharded model failed"):
            with pytest.raises((ValueError, RuntimeError), match=message) as caught:
                generator.generate_evaluation_batch(PROBLEMS)
            assert announced(caught.value)
            said.append(str(caught.value))
            if len(said) == 1:
                assert isinstance(caught.value, RankError) == (not ranks.first)
    return said


@pytest.mark.slow
def test_a_draw_that_fails_on_rank_0_ends_all_ranks_with_its_message():
    one, other = on_ranks(2, _rank_0_cannot_draw)
    assert one == other


def _hashed_or_failed() -> list[str]:
    """The rollouts of a sharded model are named by its hash, which gathers every parameter."""
    ranks = Ranks.all()
    generator = _generator(ShardedPolicy(ShardedModel(tiny_model("llama"), ranks)))
    with across(ranks):
        found = generator.identity()["model"]
        if ranks.first:
            with pytest.raises(RankError, match=r"1 of 2 ranks failed; rank 1 says why"):
                generator.identity()
        else:
            ranks.agree(failed=True)
    return [found]


@pytest.mark.slow
def test_a_rank_that_failed_is_heard_where_the_model_is_hashed():
    whole = model_hash(tiny_model("llama"))
    assert on_ranks(2, _hashed_or_failed) == [[whole], [whole]]


def test_the_hash_of_a_sharded_model_begins_as_every_exchange_does():
    """A stand-in for the ranks: what is gathered is gathered inside `run_in_step`."""
    model, inside = tiny_model("llama"), []

    def run_in_step(work: Any) -> Any:
        inside.append(work())
        return inside[-1]

    policy: Any = object.__new__(ShardedPolicy)
    policy.model, policy._inside = model, SequenceProcessor(model)
    policy.sharded = SimpleNamespace(run_in_step=run_in_step)
    generator = _generator(policy)
    assert inside == []
    assert [generator.identity()["model"]] == inside == [model_hash(model)]


def test_a_loop_that_is_told_goes_where_the_other_went():
    """One rank after the other in one process: the second is told what the first drew."""
    policy = SequenceProcessor(tiny_model("llama"))
    steps: list[Step] = []

    def telling(local: Any) -> Step:
        steps.append(local())
        return steps[-1]

    def drawn(seed: int, **more: Any) -> list[Drawn]:
        unit = [Draw(prompt=(1, 2 + n), seed=seed + n) for n in range(3)]
        with torch.no_grad():
            return decode(
                LastLogits(policy),
                unit,
                temperature=1.0,
                top_p=1.0,
                max_new_tokens=LENGTH,
                ends=(EOS,),
                stops=lambda tokens: len(tokens) == 4 and tokens[0] % 2 == 0,
                report=lambda _: None,
                **more,
            )

    first = drawn(0, broadcast=telling)
    assert first == drawn(0)
    replayed = iter(steps)
    assert drawn(100, broadcast=lambda _: next(replayed)) == first
    assert next(replayed, None) is None
    assert drawn(100) != first
