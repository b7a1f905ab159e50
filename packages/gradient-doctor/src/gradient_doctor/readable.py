"""Which tensors have numbers that may be read, here and now.

A read of the others is not always an error that can be caught. FSDP frees the storage of a
parameter and keeps the parameter: reading it ends the process. A sum over a DTensor is a
collective: it waits for all other processes. So every read of a value asks here first.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

SHARDED = "sharded"  # a DTensor: a part of it is here
FREED = "freed"  # the storage is gone, or smaller than the tensor
FUNCTORCH = "functorch"  # wrapped by vmap, grad, jacobian(vectorize=True)
META = "meta"
FAKE = "fake"
NESTED = "nested"
THREADS = "threads"  # not a tensor's: a backward in another thread than the one that is examined
LAZY = "lazy"  # a parameter without a shape
FOREIGN = "foreign"  # of a class with rules of its own, or in a layout that we do not know

# not to be touched: a read may end the process, or wait for others, instead of raising
UNTOUCHABLE = frozenset({SHARDED, FREED, META, FAKE, LAZY})

_SPARSE = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
_NO_RULES: Any = getattr(Tensor, "__torch_dispatch__")  # noqa: B009  (typed as a method)


def unreadable(tensor: Tensor) -> str | None:
    """Why the numbers of a tensor cannot be read; None if they can."""
    kind: Any = type(tensor)
    if kind.__torch_dispatch__ is not _NO_RULES:
        if tensor.is_nested:
            return NESTED
        return {"DTensor": SHARDED, "FakeTensor": FAKE}.get(kind.__name__, FOREIGN)
    if tensor.is_meta:
        return META
    if is_lazy(tensor):
        return LAZY
    if _functorch.is_functorch_wrapped_tensor(tensor) or _functorch.is_legacy_batchedtensor(tensor):
        return FUNCTORCH
    if tensor.is_nested:
        return NESTED
    if tensor.layout is not torch.strided:
        return None if tensor.is_sparse or tensor.layout in _SPARSE else FOREIGN
    if tensor.is_quantized:
        return FOREIGN
    return None if _is_stored(tensor) else FREED


def _is_stored(tensor: Tensor) -> bool:
    """Whether the storage has room for the last element."""
    if not tensor.numel():
        return True
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride()))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= needed


def values_of(tensor: Tensor) -> Tensor | None:
    """The numbers of a tensor, without its graph: of a sparse one, those that it stores.

    What a sparse tensor leaves out is zero, so that a norm, `any` and `isfinite().all()` are those
    of the whole. None where nothing can be read.
    """
    if unreadable(tensor) is not None:
        return None
    values = tensor.detach()
    if values.is_sparse:
        return values.coalesce().values()
    return values.values() if values.layout in _SPARSE else values


def is_recorded() -> bool:
    """Whether torch.jit.trace writes down every operation now, ours too."""
    return torch._C._get_tracing_state() is not None


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Its shape; () for one that has none: a lazy parameter, a nested tensor."""
    if is_lazy(tensor) or (tensor.is_nested and tensor.layout is torch.strided):
        return ()
    return tuple(tensor.shape)


def gradient_of(tensor: Tensor) -> Tensor | None:
    """Its `.grad`; torch warns who asks that of a tensor that is no leaf, or is one no longer."""
    return tensor.grad if tensor.is_leaf else None


def as_real(values: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones: a cast would lose half of them, and warn."""
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def checksum(tensor: Tensor) -> float:
    """A number that changes with the values; nan, equal to nothing, where they cannot be read."""
    values = values_of(tensor)
    return math.nan if values is None else float(as_real(values).double().sum())


def is_finite(values: Tensor) -> bool:
    """Whether all are numbers. Their sum, which needs no memory, says so unless it overflows."""
    if values.is_floating_point() and math.isfinite(float(values.sum())):
        return True
    return bool(values.isfinite().all())


def alone() -> AbstractContextManager[Any]:
    """For our own torch calls: dispatch modes of the user's (a counter of operations, selective
    checkpointing, a tracer) neither see them nor refuse them."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def in_functorch() -> bool:
    """Whether a transform of torch.func is running."""
    return _functorch.peek_interpreter_stack() is not None


def address_of(tensor: Tensor) -> int:
    """Of its first number; 0 where there is no memory behind it."""
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
