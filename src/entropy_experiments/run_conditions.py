"""What every run keeps while it computes: full precision, and advice where memory ends.

And the device of a rank: of several processes on a machine each has one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from entropy_experiments.config import Config
from entropy_experiments.numerics.ranks import current


def own_device(device_map: Any) -> Any:
    """`auto` would spread every rank's model over all devices: a rank has the one it chose."""
    if device_map == "auto" and current().size > 1 and torch.cuda.is_available():
        return {"": torch.cuda.current_device()}
    return device_map


def refuse_sharding(config: Config) -> None:
    """For what cannot be done with a model cut over the processes."""
    if config.checkpoint.sharding != "none":
        raise ValueError(
            f"checkpoint.sharding is {config.checkpoint.sharding!r}; expected 'none': only `run` "
            "and `measure` can use a model cut over the processes. Set checkpoint.sharding: none."
        )


@contextmanager
def careful() -> Iterator[None]:
    """fp32 means fp32, and afterwards whatever it was; out of memory names the keys to lower."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"Out of memory: {error}. Lower memory_config.microbatch_size, influence.block_mb and "
            "influence.grad_chunk_size (and generation.gen_batch_size), then batch_config.B_E, B_U "
            "and G; or set memory_config.gradient_checkpointing: true."
        ) from error
    finally:
        torch.set_float32_matmul_precision(before)
