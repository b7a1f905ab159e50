"""Every step's batch on disk, and all that the offline commands need to ask about it later.

    DIR/step_N/update_batch     what step N (counted from 0) learned from: tokens, masks,
                                advantages, old log-probs, the rewards of every rollout
    DIR/step_N/evaluation       what it was probed with, if it was
    DIR/step_N/made_step        fingerprints of the gradient that was used and of the step made
    DIR/prompts                 the prompts of training and evaluation, with every column
    DIR/entropy_probe.json      the training facts
    DIR/entropy_probe_record.json   trainer, options, rewards, prompts (`training_record`)
    checkpoint-N/...            all but the prompts, beside each checkpoint that the trainer saves,
                                and beside the one that it was resumed from; there, where it is
                                small enough or asked for, the gradient itself

The copies beside a checkpoint name the weights they belong to, and are what the offline commands
read: `entropy-probe run --checkpoint checkpoint-N` replays the step that was made from it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from entropy_experiments.artifacts import sha256, write_whole
from entropy_experiments.checkpoints.layout import find_checkpoint
from entropy_experiments.checkpoints.made_step import (
    base_fingerprint,
    base_location,
    gradient_bytes,
    made_step_json,
)
from entropy_experiments.checkpoints.training_facts import FACTS_FILE
from entropy_experiments.checkpoints.training_record import (
    FINGERPRINT_FILE,
    GRADIENT_FILE,
    MADE_STEP,
    RECORD_FILE,
    SCHEMA,
    read_record,
)
from entropy_experiments.distributed import Ranks
from entropy_experiments.numerics.sketch import Fingerprint, sketch
from entropy_experiments.online.captures import Captures
from entropy_experiments.online.facts_file import refuse_unknown, write_facts
from entropy_experiments.online.prompt_files import PROMPTS, write_prompts
from entropy_experiments.online.reward_paths import recorded_rewards
from entropy_experiments.online.trl_batch import (
    step_inputs,
    token_divisor,
    unwrapped_optimizer,
    update_batch,
)
from entropy_experiments.online.trl_options import (
    recorded_options,
    recorded_trainer,
    rounded_steps,
    sampled_otherwise,
    unfollowed,
)
from entropy_experiments.sampling.importers import BY_FUNCTION
from entropy_experiments.sampling.rollout_files import save_rollouts, save_update_batch
from entropy_experiments.types import Params, Rollouts

EVALUATION, UPDATE = "evaluation", "update_batch"
GRADIENT_ELEMENTS = 20_000_000
"""A gradient of no more than this (80 MB in fp32) is kept beside a checkpoint by default."""


class Recorder:
    """`gradient`: keep the gradient itself beside checkpoints; None: where it is small enough."""

    def __init__(
        self, folder: Path, facts: Mapping[str, Any], *, gradient: bool | None = None
    ) -> None:
        refuse_unknown(facts)
        self.folder, self.facts, self.gradient = folder, facts, gradient
        self._beside: tuple[int, Path, str] | None = None
        """(step, checkpoint, its weights), what the step at hand is made from."""
        self._resumed: Path | None = None
        """The checkpoint that training was resumed from, until its batch is replaced."""
        self._record: dict[str, Any] | None = None
        self._before: Tensor | None = None
        """Sketch of the parameters before the step at hand."""
        self._pending: tuple[int, dict[str, Any], str | None] | None = None
        """(step, what is known of it, sha256 of the gradient that is kept of it)."""

    def begin(self, trainer: Any, model: Any, ranks: Ranks) -> None:
        """What does not change in training: prompts, rewards, options, the base."""
        if ranks.rank:
            return
        prompts = write_prompts(self.folder / PROMPTS, trainer)
        self._record = {
            "schema": SCHEMA,
            "trainer": recorded_trainer(trainer),
            "options": recorded_options(trainer.args),
            "unfollowed": [*unfollowed(trainer), *rounded_steps(model)],
            "sampling": sampled_otherwise(trainer.args),
            "rewards": recorded_rewards(trainer),
            "prompts": prompts,
            "base": base_fingerprint(model),
            "base_location": base_location(model),
        }
        write_facts(self.folder, trainer, self.facts)
        self._write_record(self.folder)

    def record(
        self,
        trainer: Any,
        step: int,
        ranks: Ranks,
        *,
        gradient: Mapping[str, Tensor | None],
        params: Params,
        captures: Captures | None,
    ) -> None:
        """The batch of the step at hand, and its gradient's fingerprint."""
        batch = update_batch(trainer, ranks, captures)
        parts = step_inputs(trainer, ranks)
        if ranks.rank:
            return
        if not (self.folder / FACTS_FILE).is_file():
            write_facts(self.folder, trainer, self.facts)
        if self._resumed is not None:
            self._describe_again(trainer, self._resumed)
        more = {"divisor": token_divisor(trainer), "rewards": _by_function(parts, trainer)}
        for place, meta in self._places(step):
            save_update_batch(place / UPDATE, batch, meta={**meta, **_known(more)})
        present = {name: g.detach() for name, g in gradient.items() if g is not None}
        if not all(bool(g.isfinite().all()) for g in present.values()):
            self._before = self._pending = None  # what it does to the weights is not kept
            return  # it has no fingerprint; the probe leaves this step out and says so
        made = {
            "step": step,
            "lr": float(unwrapped_optimizer(trainer.optimizer).param_groups[0]["lr"]),
            "gradient": Fingerprint.of(present),
            "without_gradient": [name for name, g in gradient.items() if g is None],
        }
        if self._before is None:
            self._before = sketch(params)
        places = self._places(step)
        beside = any("weights" in meta for _, meta in places)
        content = gradient_bytes(present) if beside and self._keeps(present) else None
        digest = None if content is None else hashlib.sha256(content).hexdigest()
        self._pending = (step, made, digest)
        for place, meta in places:
            self._write_made(place, made, None, digest if "weights" in meta else None)
            if "weights" not in meta:
                continue
            if content is not None:
                write_whole(place / MADE_STEP / GRADIENT_FILE, content)
            else:  # one that an earlier training left is of another batch
                (place / MADE_STEP / GRADIENT_FILE).unlink(missing_ok=True)

    def made(self, step: int, params: Params, ranks: Ranks) -> None:
        """The optimizer has stepped: what became of the parameters."""
        if ranks.rank or self._pending is None or self._pending[0] != step:
            return
        after = sketch(params)
        if not bool(after.isfinite().all()):
            self._before = self._pending = None
            return  # weights that overflowed have no fingerprint; measuring them says so
        assert self._before is not None  # set with the pending step
        _, made, digest = self._pending
        for place, meta in self._places(step):
            kept = digest if "weights" in meta else None
            self._write_made(place, made, after - self._before, kept)
        self._before, self._pending = after, None

    def evaluated(self, rollouts: Rollouts, step: int, ranks: Ranks) -> None:
        """The rollouts that the step at hand was probed with."""
        if ranks.rank:
            return
        for place, meta in self._places(step):
            save_rollouts(place / EVALUATION, rollouts, meta=meta)

    def saved(self, trainer: Any, checkpoint: Path, ranks: Ranks) -> None:
        """The trainer has just written this checkpoint: the next step's batch belongs to it."""
        if ranks.rank or not checkpoint.is_dir():
            return
        files = _hashes(checkpoint)
        write_facts(checkpoint, trainer, self.facts)
        self._write_record(checkpoint, files=files)
        self._belongs_to(trainer.state.global_step, checkpoint)

    def resumed(self, trainer: Any, checkpoint: Path, ranks: Ranks) -> None:
        """Training goes on from this checkpoint: so does the step at hand.

        One of another run, outside the trainer's folder, is left as it is.
        """
        own = checkpoint.resolve().parent == Path(trainer.args.output_dir).resolve()
        if ranks.rank or not own or not checkpoint.is_dir():
            return
        if not (checkpoint / FACTS_FILE).is_file():
            write_facts(checkpoint, trainer, self.facts)
        if not (checkpoint / RECORD_FILE).is_file():
            # killed between the trainer's last file and our first
            self._write_record(checkpoint, files=_hashes(checkpoint))
        self._resumed = checkpoint
        self._belongs_to(trainer.state.global_step, checkpoint)

    def _describe_again(self, trainer: Any, checkpoint: Path) -> None:
        """Facts and record of the training at hand, whose batch is about to replace the earlier
        one's: its options may be others. The files are as they were saved."""
        write_facts(checkpoint, trainer, self.facts)
        earlier = read_record((checkpoint,))
        self._write_record(checkpoint, files=None if earlier is None else earlier.files)
        self._resumed = None

    def _belongs_to(self, step: int, checkpoint: Path) -> None:
        weights = find_checkpoint(checkpoint).files[0]
        self._beside = (step, checkpoint, sha256(weights))

    def _places(self, step: int) -> list[tuple[Path, dict[str, Any]]]:
        places: list[tuple[Path, dict[str, Any]]] = [(self.folder / f"step_{step}", {"step": step})]
        if self._beside is not None and self._beside[0] == step:
            _, checkpoint, weights = self._beside
            places.append((checkpoint, {"step": step, "weights": weights}))
        return places

    def _write_record(self, folder: Path, *, files: Mapping[str, str] | None = None) -> None:
        if self._record is None:  # `begin` failed, and the probe is off
            return
        prompts = {**self._record["prompts"]}
        if prompts["sets"]:
            prompts["folder"] = os.path.relpath(self.folder / PROMPTS, folder)
        content = {**self._record, "prompts": prompts, **({"files": files} if files else {})}
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1, sort_keys=True) + "\n"
        write_whole(folder / RECORD_FILE, text.encode())

    def _write_made(
        self, place: Path, made: dict[str, Any], change: Tensor | None, gradient_sha256: str | None
    ) -> None:
        folder = place / MADE_STEP
        folder.mkdir(parents=True, exist_ok=True)
        content = made_step_json(**made, change=change, gradient_sha256=gradient_sha256)
        write_whole(folder / FINGERPRINT_FILE, content)

    def _keeps(self, gradient: Params) -> bool:
        if self.gradient is not None:
            return self.gradient
        return sum(g.numel() for g in gradient.values()) <= GRADIENT_ELEMENTS


def _hashes(checkpoint: Path) -> dict[str, str]:
    """sha256 of each file that the trainer wrote."""
    own = (FACTS_FILE, RECORD_FILE, UPDATE, EVALUATION, MADE_STEP)
    return {
        str(file.relative_to(checkpoint)): sha256(file)
        for file in sorted(checkpoint.rglob("*"))
        if file.is_file() and file.relative_to(checkpoint).parts[0] not in own
    }


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _by_function(parts: list[dict[str, Any]], trainer: Any) -> dict[str, Any] | None:
    """Each reward function's values, in the batch's order; None where it had no opinion."""
    if any(part.get(BY_FUNCTION) is None for part in parts):
        return None
    value_NF = torch.cat([part[BY_FUNCTION].cpu().double() for part in parts])
    names = [one["name"] for one in recorded_rewards(trainer)["functions"]]
    return {
        name: [None if value != value else value for value in value_NF[:, i].tolist()]
        for i, name in enumerate(names)
    }
