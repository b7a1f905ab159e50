"""What an influence study of a model cut over the processes has, and what it cannot have.

    g_H                 reverse mode, summed over ranks: one backward over E for each fold
    tokens, rollouts    differences of U's scores along u = P g_H, checked against g_H . v
    ledger lines        value by reverse mode, spread by differences over E (`estimate.central`)
    measured, what-if, leave-one-out, confirmed steps        as for a whole model

FSDP adds gradients over a pass of all ranks. What needs the gradient of every single update rollout
would take a pass for each of them, with one rank at work: it is refused before anything is loaded,
or absent by name.
"""

from __future__ import annotations

from entropy_experiments.config import Config
from entropy_experiments.distributed import current
from entropy_experiments.models.sharded import in_one_process

BY_ROLLOUT = (
    "it needs the gradient of every single rollout, and a model cut over the processes "
    "(checkpoint.sharding) gives the sum over a pass of all of them"
)
ABSENT_OF_SHARDED = {"matrix": BY_ROLLOUT, "fisher": BY_ROLLOUT}
"""Parts of summary.json and of the report, and why they are not there."""


def check_sharded_study(config: Config, *, momentum_batches: int = 0) -> None:
    """Refuse what a cut model cannot answer, before anything is read or computed."""
    sharding = config.checkpoint.sharding
    if sharding == "none":
        return
    if current().group is None:
        raise in_one_process()
    if config.influence.fisher:
        raise ValueError(
            f"influence.fisher is true with checkpoint.sharding {sharding!r}; expected false: "
            f"{BY_ROLLOUT}. Leave out --fisher, or set checkpoint.sharding: none where the model "
            "fits on one device."
        )
    if momentum_batches:
        raise ValueError(
            f"--momentum {momentum_batches} with checkpoint.sharding {sharding!r}; expected a "
            "model that one device holds: earlier checkpoints are opened whole. Leave out "
            "--momentum, or set checkpoint.sharding: none."
        )
