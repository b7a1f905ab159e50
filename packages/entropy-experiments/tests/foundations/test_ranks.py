"""The same numbers on one, two and three ranks, and no hang when one of them fails."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from entropy_experiments.distributed import ALONE, RankError, Ranks
from entropy_experiments.online.evaluation_rollouts import Fresh
from entropy_experiments.online.probe import OnlineProbe
from entropy_experiments.online.watch import Guard
from oracles.enumeration import all_rollouts
from oracles.processes import on_ranks
from oracles.transformer import TransformerPolicy

pytestmark = pytest.mark.invariant

MICROBATCH = 7
"""Twelve microbatches of unequal length: uneven for three ranks and for two."""


def _probed(alone: bool) -> list[float]:
    ranks = ALONE if alone else Ranks.all()
    policy: Any = TransformerPolicy(5)
    optimizer = torch.optim.AdamW(list(policy.params.values()), lr=0.02, weight_decay=0.1)
    rollouts = all_rollouts(policy)
    # Fresh without weights: a sample, not the population, so that error bars are real.
    sample = rollouts.take(torch.arange(0, len(rollouts), 3))
    generator = torch.Generator().manual_seed(1)
    out = []
    whole = replace(sample, weight_N=None, share=1.0)
    probe = OnlineProbe(policy, Fresh(lambda _: whole), microbatch=MICROBATCH, ranks=ranks)
    for _ in range(3):
        for value in policy.params.values():
            value.grad = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        prediction = probe.before_step({n: p.grad for n, p in policy.params.items()}, optimizer)
        optimizer.step()
        found = probe.after_step()
        for estimate in (prediction.entropy, prediction.change, prediction.baseline, found.change):
            assert estimate is not None
            out += [estimate.value, estimate.stderr]
    return out


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_change_no_number(size):
    alone = _probed(True)
    for shared in on_ranks(size, _probed, False):
        assert shared == pytest.approx(alone, rel=1e-12, abs=1e-15)


def _sums() -> list[float]:
    ranks = Ranks.all()
    mine = list(ranks.shard(range(5)))
    (total,) = ranks.all_reduce(lambda: [torch.tensor(mine).sum()])
    everyone = ranks.all_gather(lambda: mine)
    word = ranks.agree(word=7 if ranks.rank == 0 else 3)
    return [float(total), sum(map(len, everyone)), word]


def test_sums_gathers_and_words():
    assert on_ranks(3, _sums) == [[10.0, 5, 7]] * 3


WHERE = ("before anything", "in a sum", "between sums", "at the end", "in a gather")


def _failing(where: str, culprit: int) -> tuple[list[str], list[str], str]:
    """Three hooks under a guard; one rank fails in the first. Returns what was said."""
    ranks = Ranks.all()
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())

    keep = Keep()
    logging.getLogger("entropy_experiments.online").addHandler(keep)
    guard = Guard(ranks)
    done: list[str] = []

    def fail_if(place: str) -> None:
        if place == where and ranks.rank == culprit:
            raise ValueError(f"injected {place}")

    def one(place: str) -> list[torch.Tensor]:
        fail_if(place)
        return [torch.ones(3)]

    def work() -> str:
        fail_if("before anything")
        ranks.all_reduce(lambda: one("in a sum"))
        fail_if("between sums")
        ranks.all_gather(lambda: one("in a gather"))
        fail_if("at the end")
        return "whole"

    for _ in range(3):
        found = guard.run(work, doing="testing")
        done.append(found or "nothing")
    assert isinstance(guard.error, ValueError if ranks.rank == culprit else RankError)
    logging.getLogger("entropy_experiments.online").removeHandler(keep)
    # Training's own exchanges go on undisturbed: nothing of the probe's is left over in them.
    after = torch.tensor([float(ranks.rank)])
    torch.distributed.all_reduce(after)
    return done, said, str(float(after))


def _failing_everywhere() -> list[Any]:
    return [_failing(where, culprit) for where in WHERE for culprit in (0, 1)]


def test_one_failing_rank_switches_all_off_and_nobody_waits():
    both = on_ranks(2, _failing_everywhere)
    cases = [(where, culprit) for where in WHERE for culprit in (0, 1)]
    for (where, culprit), *ranks in zip(cases, *both, strict=True):
        assert [done for done, _, _ in ranks] == [["nothing"] * 3] * 2
        assert ranks[1 - culprit][1] == []  # one message is enough
        assert len(ranks[culprit][1]) == 1
        assert f"injected {where}" in ranks[culprit][1][0]
        assert [after for _, _, after in ranks] == ["1.0"] * 2
