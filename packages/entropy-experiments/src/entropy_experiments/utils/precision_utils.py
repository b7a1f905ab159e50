"""Document 004's `utils.precision_utils`: dtypes, TF32, gradients; fp64 is in `models.precision`.

The commands set all of this themselves; these are for scripts of your own.
"""

from __future__ import annotations

import torch
from torch import nn

from entropy_experiments.checkpoints.load import DTYPES
from entropy_experiments.models.precision import low_precision_operations, true_float64

__all__ = [
    "apply_global_precision",
    "force_grads_fp32",
    "low_precision_operations",
    "str_to_dtype",
    "true_float64",
]

SHORT = {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16", "fp16": "float16"}


def str_to_dtype(name: str) -> torch.dtype:
    """torch's dtype for a name such as float32, bf16 or fp64."""
    wanted = SHORT.get(name, name)
    if wanted not in DTYPES:
        known = ", ".join([*DTYPES, *SHORT])
        raise ValueError(f"dtype is {name!r}; expected one of {known}. Choose one.")
    return DTYPES[wanted]


def apply_global_precision(allow_tf32: bool = False, matmul_precision: str | None = None) -> None:
    """Sets the precision of float32 matrix products for the whole process.

    "highest" without TF32, "high" with it; TF32 keeps 10 bits, too few for a change of entropy.
    Only torch.set_float32_matmul_precision is called: next to the backends' own switches torch
    refuses to say which precision there is.
    """
    wanted = matmul_precision or ("high" if allow_tf32 else "highest")
    if wanted not in ("highest", "high", "medium"):
        raise ValueError(
            f"matmul_precision is {wanted!r}; expected highest, high or medium. Take one of these."
        )
    if (wanted == "highest") == allow_tf32:
        raise ValueError(
            f"allow_tf32 is {allow_tf32} with matmul_precision {wanted!r}; expected highest "
            "without TF32, high or medium with it. Leave one of them out."
        )
    torch.set_float32_matmul_precision(wanted)


def force_grads_fp32(module: nn.Module) -> None:
    """Every gradient that is there becomes float32, as an optimizer in float32 expects it."""
    for parameter in module.parameters():
        if parameter.grad is not None and parameter.grad.dtype != torch.float32:
            parameter.grad = parameter.grad.float()
