"""What a call costs: floating-point operations, live memory, seconds."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


def tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def _addmm(_: Any, x: tuple[int, ...], y: tuple[int, ...], *__: Any, **___: Any) -> int:
    return 2 * x[0] * x[1] * y[1]


def _attention(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *_: Any, **__: Any
) -> int:
    batch, heads, asked, width = q
    return 2 * batch * heads * asked * k[2] * (width + v[3])


class _NoModules(nullcontext):
    """In place of torch's tracker, which hooks all modules: beside hooks we take other ways."""

    parents = frozenset({"Global"})


def _flop_counter() -> FlopCounterMode:
    """torch counts neither products added in place nor the CPU's fused attention."""
    aten: Any = torch.ops.aten
    mapping = {
        aten.addmm_: _addmm,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    }
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter


def flops(run: Callable[[], Any]) -> int:
    counter = _flop_counter()
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
    """The same without storages that hold a number per rollout or token.

    Those have a size among `by_nature`, and no more than `most` numbers: states of all tokens, or
    logits of one token of every rollout, do count.
    """

    def __init__(self, by_nature: set[int], most: int) -> None:
        super().__init__()
        self.by_nature, self.most = by_nature, most

    def counts(self, made: Tensor) -> bool:
        return not self.by_nature & set(made.shape) or made.numel() > self.most


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
    counter = _flop_counter()
    with counter, LiveBytes() as seen:
        found = run()
    return Counted(found, counter.get_total_flops(), seen.peak)


def timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
