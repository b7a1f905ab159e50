"""The processes between which a cut model's parameters travel: those that share the computation."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from entropy_experiments.distributed import Ranks, hold_shards


@cache
def mesh_of(ranks: Ranks, device: str) -> DeviceMesh:
    """A line of these ranks. On CPU its exchanges are those of `ranks`, in the same order.

    Made once: a group takes memory on its devices until the process ends.
    """
    group: Any = ranks.group
    if device != "cpu":
        group = dist.new_group(**like_group(ranks, f"cpu:gloo,{device}:nccl"))
    hold_shards(group, ranks)
    return DeviceMesh.from_group(group, device)


def like_group(ranks: Ranks, backend: str) -> dict[str, Any]:
    """For `new_group`: the same processes, who wait as long for each other, by another backend.

    The ranks' own is gloo, and parameters travel between the devices.
    """
    group: Any = ranks.group
    members = dist.get_process_group_ranks(group)
    return {
        "ranks": members,
        "backend": backend,
        # torch would take its own 10 or 30 minutes.
        "timeout": group._get_backend(torch.device("cpu")).options._timeout,
        # Otherwise torch waits for the processes outside, too, and they do not come.
        "use_local_synchronization": len(members) < dist.get_world_size(),
    }
