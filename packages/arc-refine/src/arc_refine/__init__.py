"""The ARC prompt-refinement trainer.

The public names below are imported when first used, so that a command's help does not import torch.
The training loop itself is `arc_refine.train.train`, or `arc-refine train`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME: dict[str, str] = {
    "TrainConfig": "config",
    "Pair": "data",
    "Task": "data",
    "leave_one_out": "data",
    "load_tasks": "data",
    "collate": "batch",
    "EFE": "efe",
    "EfeWeights": "efe",
    "RefinePolicy": "policy",
    "PolicyRL": "document_003",
    "QwenCfg": "document_003",
    "QwenHybridPrompt": "document_003",
    "Breach": "contracts",
    "ContractError": "contracts",
}

__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
