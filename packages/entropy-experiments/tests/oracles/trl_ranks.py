"""GRPO on several gloo ranks of this machine, as accelerate makes them of torchrun's variables.

A hang is an error of the test: whoever is still at work when patience ends is killed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from oracles.processes import end_process


def on_trl_ranks(size: int, work: Callable[..., Any], *args: Any, patience: float) -> list[Any]:
    """`work(*args)` on every rank; what each returned. Every process must end with code 0."""
    with tempfile.TemporaryDirectory() as folder:
        running: Any = mp.spawn(_one, (size, folder, work, args), nprocs=size, join=False)
        until = time.monotonic() + patience
        try:
            while not running.join(timeout=1):
                assert time.monotonic() < until, f"not done after {patience:.0f} s: a hang"
        finally:
            for process in running.processes:
                if process.is_alive():
                    process.kill()
        assert [process.exitcode for process in running.processes] == [0] * size
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _one(rank: int, size: int, folder: str, work: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",  # nobody meets there: the group is made here, and accelerate takes it
        "OMP_NUM_THREADS": "1",
    }
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    try:
        torch.save(work(*args), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
    end_process()
