"""What a forward pass may change of a training besides its weights, put back after the probe ran.

A model may draw random numbers in eval mode (`F.dropout` without its flag, noise from python's or
numpy's generator) or update buffers in every pass (a counter, a running mean). Training must go on
as if the probe's passes had not been made, also where one of them is how the probe finds out that
it cannot serve this model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LARGEST_BUFFER = 1 << 24
"""Numbers. What is larger holds weights (quantised ones) and no statistics; a copy would cost as
much memory as the model."""


@contextmanager
def training_state_kept(model: nn.Module | None) -> Iterator[None]:
    """Inside, random numbers may be drawn and buffers updated; outside, both are as before."""
    generators = _generator_states()
    buffers = [] if model is None else _buffers(model)
    try:
        yield
    finally:
        _restore_generators(generators)
        for module, name, buffer, value in buffers:
            if module._buffers.get(name) is not buffer:  # another tensor was put in its place
                module._buffers[name] = buffer
            # Only what changed: writing would spoil a graph that holds the buffer for backward.
            if not torch.equal(buffer, value):
                with torch.no_grad():
                    buffer.copy_(value)


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor, Tensor]]:
    return [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta and buffer.numel() <= LARGEST_BUFFER
    ]


def _generator_states() -> dict[str, Any]:
    """Of the global generators: python's, numpy's, torch's of the CPU and of every accelerator."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if hasattr(torch, "xpu") and torch.xpu.is_available() and torch.xpu.is_initialized():
        states["xpu"] = torch.xpu.get_rng_state_all()
    if torch.backends.mps.is_available():
        states["mps"] = torch.mps.get_rng_state()
    return states


def _restore_generators(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
    if "xpu" in states:
        torch.xpu.set_rng_state_all(states["xpu"])
    if "mps" in states:
        torch.mps.set_rng_state(states["mps"])
