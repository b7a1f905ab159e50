"""What a call costs: floating-point operations, live memory, seconds."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


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
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):  # a parameter, of which a view may come out
                self._seen(leaf.untyped_storage(), made=False)
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._seen(leaf.untyped_storage(), made=True)
        return out

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


def peak_bytes(run: Callable[[], Any]) -> int:
    with LiveBytes() as seen:
        run()
    return seen.peak


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
