"""What a model's own matrix products would take alone: the machine's peak for this model.

The products x W' that a call makes with the model's weights are noted: how many rows of x, which
shape and layout of W, how often. Each kind is then timed bare, torch.mm(x, W', out=y), with the
model's own weight at its place in memory and nothing else in between: warm, the median of repeats.
Their sum, every kind as often as the call made it, is time that no rearrangement of the rest can
save: `of_peak` is that sum over the time of the call, and cannot rightly exceed 1.

Adapters are not part of the peak: products with a rank of 16 are slow wherever they stand, and
would make a slow program look close to its peak. They are counted apart.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.tables import Clock, seconds
from entropy_experiments.models.call_conditions import causal_lm

REPEATS = 5
T = TypeVar("T")
Kind = tuple[int, tuple[int, int], tuple[int, int]]
"""Rows, and shape and strides of the matrix that they are multiplied with."""


class _Products(TorchDispatchMode):
    """Two-dimensional products made inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        aten = torch.ops.aten
        if packet in (aten.mm, aten.addmm, aten.addmm_):
            x, weight = args[-2:]
            self.made.append((len(x), weight))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True, eq=False)
class Products:
    """Products of a call with the model's own weights, by kind."""

    count: Counter[Kind]
    met: Counter[int]
    """Multiplications with each weight, or with tiles of it, by its address."""
    weight: dict[Kind, Tensor]
    other: int
    """Operations of all other products: adapters."""
    _room: dict[Kind, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, run: Callable[[], T]) -> tuple[Products, T]:
        """And what the call gave."""
        own = {weight.untyped_storage().data_ptr() for weight in base_weights(model)}
        with _Products() as seen:
            found = run()
        count: Counter[Kind] = Counter()
        met: Counter[int] = Counter()
        weights: dict[Kind, Tensor] = {}
        other = 0
        for rows, weight in seen.made:
            if weight.untyped_storage().data_ptr() not in own:
                other += 2 * rows * weight.numel()
                continue
            kind = (rows, _pair(weight.shape), _pair(weight.stride()))
            count[kind] += 1
            met[weight.untyped_storage().data_ptr()] += rows * weight.numel()
            weights.setdefault(kind, weight.detach())
        if not count:
            raise ValueError(
                "The call made no product with the model's own weights; expected one for every "
                "linear layer. Does it run the model at all?"
            )
        return cls(count=count, met=met, weight=weights, other=other), found

    @property
    def operations(self) -> int:
        return sum(n * 2 * rows * a * b for (rows, (a, b), _), n in self.count.items())

    def tokens(self, model: nn.Module) -> dict[str, int]:
        """Tokens that went through the layers and through the head, padding included."""
        head = causal_lm(model).get_output_embeddings().weight
        through = {
            w.untyped_storage().data_ptr(): self.met[w.untyped_storage().data_ptr()] // w.numel()
            for w in base_weights(model)
        }
        at_head = through.pop(head.untyped_storage().data_ptr())
        return {"layers": max(through.values()), "head": at_head}

    def alone(self, clock: Clock) -> float:
        """Seconds that all of them would take by themselves, on the threads now set."""
        return sum(n * self._bare(kind, clock) for kind, n in self.count.items())

    def _bare(self, kind: Kind, clock: Clock) -> float:
        weight = self.weight[kind]
        if kind not in self._room:
            draw = torch.Generator().manual_seed(0)
            x = torch.randn(kind[0], len(weight), generator=draw).to(weight)
            self._room[kind] = x, x.new_empty(kind[0], weight.shape[1])
        x, y = self._room[kind]
        with torch.no_grad():
            torch.mm(x, weight, out=y)
            return statistics.median(
                seconds(lambda: torch.mm(x, weight, out=y), clock) for _ in range(REPEATS)
            )


def base_weights(model: nn.Module) -> list[Tensor]:
    """Of all linear layers but those of adapters, and of the head."""
    layers = [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "lora_" not in name
    ]
    return [*layers, causal_lm(model).get_output_embeddings().weight]


def _pair(size: Any) -> tuple[int, int]:
    first, second = size
    return int(first), int(second)
