"""Whether a model can be cut over ranks, and this torch can do it: asked before it is cut."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from entropy_experiments.distributed import Ranks

NEEDED = (
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
)
"""Of FSDP2's modules; torch got them later than `fully_shard` itself."""
TRIED = "2.13"
"""The version of torch that shards in the tests."""


def check_torch(module: type = FSDPModule) -> None:
    """Before anything is cut: a mean in place of a sum would be another gradient."""
    missing = [name for name in NEEDED if not hasattr(module, name)]
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__} has no {', '.join(missing)} on {module.__name__}; expected "
            f"all of them, as torch {TRIED} has, with which sharding works. Upgrade torch, or set "
            "checkpoint.sharding: none."
        )


def check_shardable(model: nn.Module, ranks: Ranks) -> None:
    if ranks.group is None:
        raise in_one_process()
    check_torch()
    quantised = [name for name, p in model.named_parameters() if not p.is_floating_point()]
    if quantised:
        raise ValueError(
            f"{len(quantised)} parameters are quantised ({quantised[0]} is "
            f"{model.get_parameter(quantised[0]).dtype}); expected floating point, which can be "
            "cut over ranks. Load the base without quantisation, or set checkpoint.base to the "
            "unquantised model."
        )
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    if len(trained) > 1:
        said = ", ".join(sorted(str(dtype) for dtype in trained))
        raise ValueError(
            f"The trainable parameters have several dtypes ({said}); expected one, since their "
            "gradients are summed together. Set checkpoint.dtype."
        )


def in_one_process() -> ValueError:
    return ValueError(
        "A sharded model in 1 process; expected several. Start the command with torchrun "
        "--nproc-per-node 2 (or more), or set checkpoint.sharding: none."
    )
