"""Values that travel between stages.

The shape legend, used as a suffix of every tensor's name in the package:

| letter | axis |
|---|---|
| N | rollouts |
| S | positions of a padded sequence (prompt and response) |
| T | tokens gathered from such positions, in any order |
| V | vocabulary |
| D | hidden width |
| P | prompts |
| M | per-rollout sums that an estimator is made of |
| C | clusters of an influence: prompts, or rollouts of a fixed set |

`x_NS[n, s]` always speaks of token `s` and the distribution it was drawn from. The shift by one
between a model's output and the token it predicts is in `numerics.entropy` (`response_scores` and
`response_support`, which a policy's `score` and `support` call) and nowhere else.
"""

from entropy_experiments.types.direction import (
    AdamGroup,
    Direction,
    OptimizerState,
    SGDGroup,
    check_direction,
    check_params,
)
from entropy_experiments.types.estimate import (
    Attribution,
    Estimand,
    Estimate,
    Influence,
    combine,
)
from entropy_experiments.types.rollouts import (
    BatchedPolicy,
    NucleusPolicy,
    Params,
    Part,
    Policy,
    Rollouts,
    Scores,
    UpdateBatch,
)

__all__ = [
    "AdamGroup",
    "Attribution",
    "BatchedPolicy",
    "Direction",
    "Estimand",
    "Estimate",
    "Influence",
    "NucleusPolicy",
    "OptimizerState",
    "Params",
    "Part",
    "Policy",
    "Rollouts",
    "SGDGroup",
    "Scores",
    "UpdateBatch",
    "check_direction",
    "check_params",
    "combine",
]
