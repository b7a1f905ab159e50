"""Document 004's `fisher_kernel`: what a study is asked for, and the kernel itself.

`WorkspaceSpec` and `BatchRequest` live in `config.sections`, the kernel in `attribution.fisher`.
"""

from entropy_experiments.attribution.fisher import (
    Contributor,
    Kernel,
    fisher_blocks,
    fisher_kernel,
    top_contributors,
)
from entropy_experiments.config.sections import BatchKind, BatchRequest
from entropy_experiments.config.sections import Workspace as WorkspaceSpec
from entropy_experiments.pipelines.influence.runner import EntropyInfluencePlan

__all__ = [
    "BatchKind",
    "BatchRequest",
    "Contributor",
    "EntropyInfluencePlan",
    "Kernel",
    "WorkspaceSpec",
    "fisher_blocks",
    "fisher_kernel",
    "top_contributors",
]
