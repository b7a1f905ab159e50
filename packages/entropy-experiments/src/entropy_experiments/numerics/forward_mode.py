"""Forward mode through weights that do not move: y = x W' + b has the tangent dx W', and no more.

torch's own rule for a matrix product is dx W' + x dW'. Where W has no tangent it multiplies by a
matrix of zeros all the same (torch 2.13). Under LoRA nearly every weight is such a one, so that a
pass along one direction would cost three plain passes instead of two. The numbers are the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode

WORTHWHILE = 1 << 25
"""Multiplications saved that are worth the call of a Python rule, about a millisecond."""


def only_forward_mode() -> bool:
    """Dual numbers, of one direction or of many at once, and nothing reverse around them.

    Dual numbers of dual numbers are another matter: the rules here would drop terms.
    """
    kinds = [level.key() for level in get_interpreter_stack() or ()]
    forward = {TransformType.Jvp, TransformType.Vmap}
    once = kinds.count(TransformType.Jvp) == 1
    return once and set(kinds) <= forward and not torch.is_grad_enabled()


def frozen_weights() -> AbstractContextManager[Any]:
    """Inside, large linear maps whose weights do not move are differentiated by the shorter rule.

    Only in forward mode; elsewhere this does nothing.
    """
    return _ShorterRule() if only_forward_mode() else nullcontext()


def refuse_nested_forward_mode() -> None:
    """Torch switches forward mode off inside a custom jvp rule: a jvp of a jvp would be wrong."""
    stack = get_interpreter_stack() or []
    if sum(level.key() == TransformType.Jvp for level in stack) > 1:
        raise RuntimeError(
            "Forward mode over forward mode reached the token scores, where torch would silently "
            "drop terms. Use numerics.second_order.pushforward2 for second derivatives."
        )


def values_list(x: Tensor) -> list[Any]:
    """`x.tolist()` of lengths, tokens and the like, also inside a function that is differentiated.

    There every result is wrapped, constants too, and before torch 2.10 a wrapped tensor has no
    `tolist`. Batches of vmap stay wrapped: their axis is hidden, and torch refuses them.
    """
    while is_gradtrackingtensor(x):
        x = get_unwrapped(x)
    with temporarily_clear_interpreter_stack():  # which would wrap it again, inside tolist
        return x.tolist()


def linear_of_rows(x: Tensor, weight: Tensor, bias: Tensor | None, rows: slice) -> Tensor:
    """x W' + b with some rows of W and b, by the shorter rule where only x moves; x's precision.

    To cut or cast W first would hide from torch.func that it does not move.
    """
    if only_forward_mode() and _only_the_input_moves(x, weight, bias):
        return _FrozenRows.apply(x, weight, bias, rows.start, rows.stop)
    return _linear_of_rows(x, weight, bias, rows)


def _linear_of_rows(x: Tensor, weight: Tensor, bias: Tensor | None, rows: slice) -> Tensor:
    weight, bias = weight[rows], None if bias is None else bias[rows]
    if weight.dtype in (torch.float16, torch.bfloat16):  # nothing is rounded, it is only widened
        weight = weight.to(x.dtype)
    return nn.functional.linear(x, weight, bias)


class _ShorterRule(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear and not kwargs and _only_the_input_moves(*args):
            return _FrozenLinear.apply(*args, *([None] if len(args) == 2 else []))
        return func(*args, **kwargs)


def _only_the_input_moves(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    return (
        x.numel() * weight.shape[0] >= WORTHWHILE
        and is_functorch_wrapped_tensor(x)
        and not is_functorch_wrapped_tensor(weight)
        and (bias is None or not is_functorch_wrapped_tensor(bias))
    )


class _FrozenLinear(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, weight, _ = inputs
        ctx.set_materialize_grads(False)  # no zeros for weights: that is the whole point
        ctx.save_for_forward(weight)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor | None:
        (weight,) = ctx.saved_tensors
        return None if tangents[0] is None else nn.functional.linear(tangents[0], weight)


class _FrozenRows(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> Tensor:
        return _linear_of_rows(x, weight, bias, slice(start, stop))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, weight, _, ctx.start, ctx.stop = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_forward(weight)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor | None:
        (weight,) = ctx.saved_tensors
        if tangents[0] is None:
            return None
        return _linear_of_rows(tangents[0], weight, None, slice(ctx.start, ctx.stop))
