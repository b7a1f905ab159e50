"""LoRA layers that add their adapters in place: y = x W' + b, then y += s (x A') B' on y itself.

peft writes a fresh [tokens, out] tensor for the product by B, for the scaling and for the sum. All
three are one accumulating product (`addmm_`). Autograd and torch.func keep peft's own forward:
this one is for passes in which nothing is differentiated, as scoring is.

It is used where peft's forward is exactly this formula, checked in every call, since adapters
are switched, merged and hooked while a model lives. Elsewhere (DoRA and other variants, biases in
B, half precision, autocast, hooks inside the layer) the layer's own forward runs. In fp32 and fp64
the two differ by the rounding of a few additions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from entropy_experiments.models.call_conditions import forward_as, nothing_differentiated

DTYPES = (torch.float32, torch.float64)
"""In half precision peft rounds after every step; one product that rounds once is another number.
"""


def plain_lora_layers(model: nn.Module) -> dict[Any, str]:
    """Layers that may be fused, and their names: peft's class around nn.Linear, no subclass."""
    try:
        from peft.tuners.lora.layer import Linear
    except ImportError:  # without peft there are no adapters
        return {}
    return {
        m: name
        for name, m in model.named_modules()
        if type(m) is Linear and type(m.base_layer) is nn.Linear and not m.fan_in_fan_out
    }


@contextmanager
def fused_adapters(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, these layers add their adapters in place wherever nothing is differentiated."""
    with ExitStack() as stack:
        # A forward of its own (accelerate's offloading, say) is not peft's, and stays.
        for layer in layers if nothing_differentiated() else ():
            if "forward" not in layer.__dict__:
                stack.enter_context(forward_as(layer, _fused(layer, layer.forward)))
        yield


class Adapter(NamedTuple):
    a_RD: Tensor
    b_OR: Tensor
    scale: float


def adapters_of(layer: Any) -> list[Adapter]:
    """The active ones."""
    return [
        Adapter(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])
        for name in layer.active_adapters
    ]


def _fused(layer: Any, own_forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not _can_be_fused(layer, x):
            return own_forward(x, *args, **kwargs)
        x_TD = x.view(-1, x.shape[-1])
        y_TO = layer.base_layer(x_TD)
        # Parameters as they are now: functional_call has put its own into the modules.
        add_adapters(adapters_of(layer), x_TD, y_TO)
        return y_TO.view(*x.shape[:-1], y_TO.shape[-1])

    return forward


def add_adapters(adapters: Sequence[Adapter], x_TD: Tensor, y_TO: Tensor) -> None:
    """y += s (x A') B' of each."""
    for one in adapters:
        y_TO.addmm_(nn.functional.linear(x_TD, one.a_RD), one.b_OR.t(), alpha=one.scale)


def _can_be_fused(layer: Any, x: Tensor) -> bool:
    """Whether the layer's own forward, called with x now, would be the sum above and no more."""
    if not nothing_differentiated() or not x.is_contiguous() or not is_plain_lora(layer):
        return False
    weights = [weight for one in adapters_of(layer) for weight in (one.a_RD, one.b_OR)]
    return are_alike(x, layer.base_layer.weight, layer.base_layer.bias, *weights)


def is_plain_lora(layer: Any) -> bool:
    """Whether the layer as it stands is plain LoRA, unmerged, and nobody looks inside."""
    if layer.disable_adapters or layer.merged:
        return False
    names, base = layer.active_adapters, layer.base_layer
    if torch.is_autocast_enabled(base.weight.device.type):
        return False
    # Hooks may keep what a module gives, or change it; even those on all modules of the process.
    if nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks:
        return False
    plain_names = layer.lora_A.keys() - layer.lora_variant.keys()
    if not all(name in plain_names and type(layer.scaling[name]) in (int, float) for name in names):
        return False
    inner = [layers[name] for layers in (layer.lora_A, layer.lora_B) for name in names]
    dropouts = [layer.lora_dropout[name] for name in names]
    return (
        all(type(m) is nn.Linear and m.bias is None for m in inner)
        and all(_does_nothing(m) for m in dropouts)
        and all(_is_untouched(m) for m in (base, *inner, *dropouts))
    )


def _does_nothing(dropout: nn.Module) -> bool:
    return type(dropout) is nn.Identity or (type(dropout) is nn.Dropout and not dropout.training)


def _is_untouched(module: nn.Module) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def are_alike(x: Tensor, *others: Tensor | None) -> bool:
    """Ordinary tensors of one dtype on one device: nothing is cast, moved or sharded."""
    return x.dtype in DTYPES and all(
        type(t) in (Tensor, nn.Parameter) and (t.dtype, t.device) == (x.dtype, x.device)
        for t in (x, *others)
        if t is not None
    )
