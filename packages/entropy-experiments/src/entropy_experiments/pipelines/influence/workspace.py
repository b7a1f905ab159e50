"""The update batch of a study as a workspace: sizes that it sets, and where it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from entropy_experiments.config import Config
from entropy_experiments.config.estimates import Workspace
from entropy_experiments.pipelines.influence.requests import (
    WorkspaceDrawn,
    WorkspaceUpdate,
    workspace_params,
)
from entropy_experiments.pipelines.influence.rollout_sources import Made
from entropy_experiments.pipelines.influence.store import batch_digest
from entropy_experiments.pipelines.probe_sampling import OpenCheckpoint
from entropy_experiments.sampling.rollout_files import (
    MANIFEST,
    load_update_batch,
    save_update_batch,
)
from entropy_experiments.types import UpdateBatch


def workspace_sizes(config: Config) -> Config:
    """The configuration with the sizes that influence.update_batch sets for a drawn batch."""
    params = workspace_params(config.influence.update_batch)
    changes: dict[str, Any] = {}
    if isinstance(params, WorkspaceUpdate | WorkspaceDrawn):
        changes["data.update_prompts"] = params.prompts
    if isinstance(params, WorkspaceUpdate):
        changes["data.update_rollouts"] = params.batch
    if isinstance(params, WorkspaceDrawn):
        changes["data.update_split"] = params.split or config.data.evaluation_split
    changes["data.responses_per_prompt"] = getattr(params, "group", None)
    changes = {key: value for key, value in changes.items() if value is not None}
    return config.replaced(changes, where="influence.update_batch.params") if changes else config


def save_workspace(asked: Workspace, made: Made, probed: OpenCheckpoint, model: str) -> None:
    """Into save_path, once: a rerun changes nothing, and another batch is refused."""
    if asked.save_path is None or asked.save_path == asked.load_path:
        return
    folder = Path(asked.save_path)
    meta = {
        "model": model,
        "kind": asked.kind,
        "params": asked.params,
        "dataset": probed.facts["dataset_name"],
        "real": made.real,
        "bound": made.bound,
    }
    if not (folder / MANIFEST).is_file():
        save_update_batch(folder, made.batch, meta=meta)
        return
    theirs, their_meta = load_update_batch(folder)
    if their_meta == meta and _same(theirs, made.batch):
        return
    raise ValueError(
        f"influence.update_batch.save_path: {folder} holds another update batch (fingerprint "
        f"{theirs.rollouts.fingerprint[:12]}... there, {made.batch.rollouts.fingerprint[:12]}"
        "... here, or other advantages, log-probs or settings). Give another folder, or delete "
        "that one."
    )


def _same(one: UpdateBatch, other: UpdateBatch) -> bool:
    ours, theirs = (batch.rollouts.fingerprint for batch in (one, other))
    return ours == theirs and batch_digest(one) == batch_digest(other)
