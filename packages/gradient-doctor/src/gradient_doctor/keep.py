"""Everything that one forward and backward may change, put back afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def everything_kept(modules: Iterable[nn.Module], parameters: list[Tensor]) -> Iterator[None]:
    """Gradients, buffers, modes, flags and random states come out as they went in.

    Parameters are not copied: a loss only reads them. One that writes to them is told so.
    """
    parts = list({id(part): part for module in modules for part in module.modules()}.values())
    modes = [(part, part.training) for part in parts]
    buffers = [
        (part, name, buffer, None if buffer is None else buffer.detach().clone())
        for part in parts
        for name, buffer in part._buffers.items()
    ]
    kept = [(p, p.grad, p.requires_grad, p._version) for p in parameters]
    generators = random_states()
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for part, mode in modes:
            part.training = mode
        with torch.no_grad():
            for part, name, buffer, copy in buffers:
                if buffer is not None and copy is not None:
                    buffer.copy_(copy)
                part._buffers[name] = buffer
        for parameter, gradient, needs, _ in kept:
            parameter.requires_grad_(needs)
            parameter.grad = gradient
        restore_random_states(generators)
    changed = [p for p, _, _, version in kept if p._version != version]
    if changed:
        raise ValueError(
            f"loss_fn has changed {len(changed)} parameters; it must only compute the loss: leave "
            "the optimizer's step and any in-place change of weights out of it"
        )


def random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
