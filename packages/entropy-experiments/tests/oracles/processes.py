"""Several ranks on one machine: a function of (rank, size) run in that many gloo processes."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = timedelta(seconds=90)
"""A hang is an error of the test, not an endless test."""


def on_ranks(size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(*args)` on every rank; what each returned, in order. `work` must be importable."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_one, (size, folder, work, args), nprocs=size)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _one(rank: int, size: int, folder: str, work: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=PATIENCE
    )
    try:
        torch.save(work(*args), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()
    end_process()


def end_process() -> None:
    """Leave without Python's shutdown, as commands do under torchrun (`cli.job.leaving`)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
