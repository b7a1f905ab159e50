"""Document 004's `entropy_influence`; the home is `pipelines.influence.runner`."""

from entropy_experiments.pipelines.influence.runner import (
    BatchRequest,
    EntropyInfluencePlan,
    EntropyInfluenceRunner,
    WorkspaceSpec,
    what_if_from,
)

__all__ = [
    "BatchRequest",
    "EntropyInfluencePlan",
    "EntropyInfluenceRunner",
    "WorkspaceSpec",
    "what_if_from",
]
