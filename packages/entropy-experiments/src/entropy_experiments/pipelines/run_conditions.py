"""What every run keeps while it computes: full precision, as many threads as are quickest, and
advice where memory ends.

And where a checkpoint goes: of several processes on a machine each has a device of its own, or a
part of the model (`checkpoint.sharding`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from entropy_experiments.checkpoints.load import Checkpoint, load_sharded
from entropy_experiments.config import Config
from entropy_experiments.distributed import current
from entropy_experiments.input_errors import short
from entropy_experiments.models.sharded import MODES as SHARDED_MODES
from entropy_experiments.models.sharded import ShardedModel, in_one_process
from entropy_experiments.numerics.derivatives import full_precision
from entropy_experiments.threads import chosen_threads


def own_device(device_map: Any) -> Any:
    """`auto` would spread every rank's model over all devices: a rank has the one it chose."""
    if device_map == "auto" and current().size > 1 and torch.cuda.is_available():
        return {"": torch.cuda.current_device()}
    return device_map


def loaded(
    config: Config, load: Callable[..., Checkpoint]
) -> tuple[Checkpoint, ShardedModel | None]:
    """What `load` reads: whole on this rank's device, or cut over all ranks."""
    asked = config.checkpoint
    if asked.sharding == "none":
        return load(device_map=own_device(asked.device)), None
    cuda = torch.cuda.is_available() and asked.device != "cpu"
    # Without a map: into host memory, in the precision that the device will have.
    device_map = None if cuda else "cpu"
    return load_sharded(
        lambda: load(device_map=device_map, quantise=False), current(), "cuda" if cuda else "cpu"
    )


def check_sharding(config: Config, *, top_p: float) -> None:
    """Refuse a cut model in one process, and of a truncated distribution."""
    sharding = config.checkpoint.sharding
    if sharding == "none":
        return
    if current().group is None:
        raise in_one_process()
    if top_p < 1:
        raise ValueError(
            f"sampling.top_p is {top_p:g} with checkpoint.sharding {sharding!r}; expected 1: the "
            "support of a truncated distribution is not watched on a sharded model. Set "
            "sampling.top_p: 1."
        )


def check_sharded_derivatives(config: Config) -> None:
    """Refuse derivatives that a cut model does not have."""
    method, sharding = config.predict.method, config.checkpoint.sharding
    if sharding != "none" and method not in ("auto", *SHARDED_MODES):
        raise ValueError(
            f"predict.method is {method!r} with checkpoint.sharding {sharding!r}, which has "
            "neither forward mode nor a double backward. Set predict.method: auto (or "
            "central, which it is: per-rollout terms, hence error bars) or reverse."
        )


def refuse_sharding(config: Config) -> None:
    """For what cannot be done with a model cut over the processes."""
    if config.checkpoint.sharding != "none":
        raise ValueError(
            f"checkpoint.sharding is {config.checkpoint.sharding!r}; expected 'none': only `run`, "
            "`measure`, `influence` and `evaluate` can use a model cut over the processes. Set "
            "checkpoint.sharding: none."
        )


@contextmanager
def analysis_conditions() -> Iterator[None]:
    """fp32 means fp32, threads as many as are quickest; out of memory names the keys to lower."""
    try:
        with full_precision(), chosen_threads():
            yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        # On a CPU it is a plain RuntimeError, or numpy's MemoryError.
        on_cpu = not isinstance(error, torch.OutOfMemoryError | MemoryError)
        if on_cpu and "can't allocate memory" not in str(error):
            raise
        raise MemoryError(
            f"Out of memory: {short(error)}. Lower memory.microbatch_size, "
            "influence.gradient_block_mb and influence.directions_per_pass (and "
            "sampling.batch_size), then data.evaluation_prompts, data.update_prompts and "
            "data.responses_per_prompt; or set memory.gradient_checkpointing: true."
        ) from error
