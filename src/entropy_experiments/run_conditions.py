"""What every run keeps while it computes: full precision, and advice where memory ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
