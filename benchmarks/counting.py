"""What a call costs: floating-point operations, live memory, seconds."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


def tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def flops(run: Callable[[], Any]) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    return counter.get_total_flops()


class LiveBytes(TorchDispatchMode):
    """Largest sum of tensor storages made inside the block that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tensors((args, kwargs)):  # a parameter, of which a view may come out
            self._seen(leaf.untyped_storage(), made=False)
        out = func(*args, **kwargs)
        for leaf in tensors(out):
            self._seen(leaf.untyped_storage(), made=self.counts(leaf))
        return out

    def counts(self, made: Tensor) -> bool:
        return True

    def _seen(self, storage: Any, *, made: bool) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes() if made else 0
        self.live += self._known[key]
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)


class WorkingBytes(LiveBytes):
    """The same without storages made for a tensor of which one size is among `by_nature`."""

    def __init__(self, by_nature: set[int]) -> None:
        super().__init__()
        self.by_nature = by_nature

    def counts(self, made: Tensor) -> bool:
        return not self.by_nature & set(made.shape)


def peak_bytes(run: Callable[[], Any]) -> int:
    with LiveBytes() as seen:
        run()
    return seen.peak


class Counted(NamedTuple):
    """What a call gave, and what it took."""

    found: Any
    flops: int
    peak_bytes: int


def counted(run: Callable[[], Any]) -> Counted:
    """All counts from one call."""
    counter = FlopCounterMode(display=False)
    with counter, LiveBytes() as seen:
        found = run()
    return Counted(found, counter.get_total_flops(), seen.peak)


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
