"""A rank that is gone, and a machine with too few devices: what is said."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from entropy_experiments.cli import job
from entropy_experiments.distributed import LostRankError, Ranks, announced

pytestmark = pytest.mark.faults


def two_ranks() -> Any:
    ranks: Any = Ranks()
    ranks.group, ranks.size = object(), 2
    return ranks


@pytest.mark.parametrize("exchange", ["agree", "all_reduce", "all_gather", "broadcast_from_zero"])
def test_a_broken_exchange_is_a_lost_rank(exchange):
    """What gloo raises when the other process was killed."""
    closed = RuntimeError("[gloo/transport] Connection closed by peer [127.0.0.1]:1234\nmore")
    ranks = two_ranks()
    with (
        mock.patch("torch.distributed.all_reduce", side_effect=closed),
        pytest.raises(LostRankError, match=r"Another rank is gone \(.*Connection closed") as found,
    ):
        getattr(ranks, exchange)(*([] if exchange == "agree" else [lambda: [torch.ones(1)]]))
    assert "Start the same command again" in str(found.value)
    assert "more" not in str(found.value)
    assert announced(found.value)  # nobody waits to be told


def test_an_error_made_of_another_is_known_when_that_one_is():
    """Out of memory becomes a MemoryError with advice, long after the ranks were told."""
    told = RuntimeError("out of memory")
    told.announced_to_ranks = True  # type: ignore[attr-defined]
    advice = MemoryError("lower the microbatch")
    assert not announced(advice)
    advice.__cause__ = told
    assert announced(advice)


def test_more_processes_than_devices(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"2 CUDA devices, and this is its process 4; .*Lower"):
        job._join_ranks()


@pytest.mark.parametrize(
    ("env", "several"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"RANK": "1", "WORLD_SIZE": "2"}, True),
    ],
)
def test_torchrun_is_recognised(monkeypatch, env, several):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert job.is_multi_process() == several
