"""The processes of a mesh are those of its ranks, on whatever device."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from entropy_experiments.distributed import Ranks, shards_of
from entropy_experiments.models import sharded
from oracles.processes import PATIENCE, on_ranks

pytestmark = pytest.mark.invariant

HOURS = timedelta(hours=12)
NCCL = "cpu:gloo,cuda:nccl"


def _ranks(monkeypatch: pytest.MonkeyPatch, members: list[int], world: int) -> Any:
    """Stand-ins: no process but this one."""
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=HOURS))
    ranks: Any = Ranks()
    ranks.group = SimpleNamespace(_get_backend=lambda _: backend, group_name="of the ranks")
    monkeypatch.setattr(sharded.dist, "get_process_group_ranks", lambda _: members)
    monkeypatch.setattr(sharded.dist, "get_world_size", lambda: world)
    return ranks


@pytest.mark.parametrize(("members", "alone"), [([0, 1, 2, 3], False), ([1, 3], True)])
def test_on_cuda_the_group_is_that_of_the_ranks(monkeypatch, members, alone):
    ranks, asked = _ranks(monkeypatch, members, 4), []

    def new_group(**given: Any) -> Any:
        asked.append(given)
        return SimpleNamespace(group_name="of the devices")

    monkeypatch.setattr(sharded.dist, "new_group", new_group)
    monkeypatch.setattr(sharded.DeviceMesh, "from_group", lambda group, device: (group, device))
    group, device = sharded.mesh_of(ranks, "cuda")  # type: ignore[misc]
    assert (group.group_name, device) == ("of the devices", "cuda")
    assert asked == [
        {
            "ranks": members,
            "backend": NCCL,
            "timeout": HOURS,
            "use_local_synchronization": alone,
        }
    ]
    held = SimpleNamespace(device_mesh=SimpleNamespace(get_group=lambda: group))
    assert shards_of({"w": held}) is ranks  # type: ignore[dict-item]
    assert sharded.mesh_of(ranks, "cuda") == (group, device)
    assert len(asked) == 1


def _outer_two() -> list[Any]:
    """Of three processes the first and the last; the other does not come."""
    world = sharded.like_group(Ranks(dist.group.WORLD), "gloo")
    group: Any = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return [world]
    asked = sharded.like_group(Ranks(group), "gloo")
    made: Any = dist.new_group(**asked)
    total = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(total, group=made)
    return [world, dist.get_process_group_ranks(made), float(total), asked["timeout"]]


@pytest.mark.slow
def test_a_group_of_some_of_the_processes():
    """All wait as long as the job does; a group made without a word waits torch's half an hour."""
    world = {"ranks": [0, 1, 2], "backend": "gloo", "timeout": PATIENCE}
    world["use_local_synchronization"] = False
    found = [world, [0, 2], 101.0, timedelta(minutes=30)]
    assert on_ranks(3, _outer_two) == [found, [world], found]
