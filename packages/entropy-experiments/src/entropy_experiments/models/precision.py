"""fp64 that is fp64 throughout, for checks on small models.

`.double()` on a transformers model is not: RMSNorm and rotary embeddings cast to fp32 on the way,
and so does eager attention's softmax, which leaves derivatives right to five digits only. Here
norms and rotary embeddings get a forward in the dtype of their input, and attention goes through
sdpa. Afterwards a forward pass is watched: an operation that still returns fewer digits is an
error, so an architecture that changes under us is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from entropy_experiments.models.call_conditions import causal_lm, eval_mode, math_attention

PLAIN_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds whose frequencies do not depend on the sequence at hand."""


def _rms_norm(module: Any, hidden_NSD: Tensor) -> Tensor:
    variance = hidden_NSD.pow(2).mean(-1, keepdim=True)
    return module.weight * (hidden_NSD * torch.rsqrt(variance + module.variance_epsilon))


def _rotary(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    # The frequencies stay those of the fp32 model, so that this is the same model, only sharper.
    freqs = position_ids[..., None].to(x.dtype) * module.inv_freq.to(x.device, x.dtype)
    both = torch.cat((freqs, freqs), dim=-1)
    return both.cos() * module.attention_scaling, both.sin() * module.attention_scaling


PATCHES: dict[str, dict[str, Callable[..., Any]]] = {
    "gpt2": {},
    **{
        model_type: {f"{name}RMSNorm": _rms_norm, f"{name}RotaryEmbedding": _rotary}
        for model_type, name in (
            ("granite", "Granite"),
            ("llama", "Llama"),
            ("mistral", "Mistral"),
            ("qwen2", "Qwen2"),
            ("qwen3", "Qwen3"),
        )
    },
}


def true_float64(model: nn.Module) -> nn.Module:
    """The same model, now in fp64 in every operation; changed in place and returned."""
    lm = causal_lm(model)
    kind, config = lm.config.model_type, lm.config
    if kind not in PATCHES:
        raise ValueError(
            f"True fp64 is not known for architecture {kind!r}; expected one of "
            f"{', '.join(sorted(PATCHES))}. Use float32, or add its norms to policy/precision.py."
        )
    if config._attn_implementation != "sdpa":
        raise ValueError(
            f"True fp64 needs attn_implementation='sdpa'; got {config._attn_implementation!r}, "
            "whose softmax is fp32. Load the model with sdpa."
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in PLAIN_ROPE:
        raise ValueError(f"True fp64 is not known for rope_type {rope!r}; expected {PLAIN_ROPE}.")
    model.double()
    for module in model.modules():
        patch = PATCHES[kind].get(type(module).__name__)
        if patch is not None:
            object.__setattr__(module, "forward", _bound(patch, module))
    low = low_precision_operations(model)
    if low:
        raise ValueError(
            f"{kind} still computes below fp64 in {', '.join(low)}. The installed transformers "
            "differs from what policy/precision.py knows: use float32."
        )
    return model


def low_precision_operations(model: nn.Module) -> list[str]:
    """Operations of a forward pass that return floating point below fp64."""
    tokens_NS = torch.arange(4, device=next(model.parameters()).device)[None]
    watch = _Watch()
    with torch.no_grad(), eval_mode(model), math_attention(), watch:
        model(input_ids=tokens_NS, attention_mask=torch.ones_like(tokens_NS), use_cache=False)
    return sorted(watch.low)


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.low: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            floating = isinstance(value, Tensor) and value.is_floating_point()
            if floating and value.dtype != torch.float64:
                self.low.add(str(func))
        return out


def _bound(patch: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    return lambda *args, **kwargs: patch(module, *args, **kwargs)
