"""The files of a recorded run, whoever trains: batches, fingerprints, facts, and where they go.

    DIR/step_N/...          of every step N, counted from 0
    CHECKPOINT/...          the same of the step that is made from a checkpoint, beside its weights

`record` says what the files hold and collects them from a TRL trainer; `step_recorder` takes them
from a loop of your own. Sharded parameters and gradients (FSDP2's DTensor) are put together one at
a time, on every rank at once; rank 0 writes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from entropy_experiments.artifacts import sha256, write_json, write_whole
from entropy_experiments.checkpoints.layout import OPTIMIZER_FILES, PARAM_NAMES, find_checkpoint
from entropy_experiments.checkpoints.recorded_step import (
    FINGERPRINT_FILE,
    GRADIENT_FILE,
    MADE_STEP,
    RecordedStep,
    gradient_bytes,
)
from entropy_experiments.checkpoints.training_facts import FACTS_FILE, FactsFile
from entropy_experiments.checkpoints.training_record import (
    RECORD_FILE,
    RecordContent,
    read_record,
)
from entropy_experiments.distributed import Ranks, is_shard
from entropy_experiments.numerics.sketch import Fingerprint, sketch
from entropy_experiments.sampling.rollout_files import save_rollouts, save_update_batch
from entropy_experiments.types import Params, Rollouts, UpdateBatch

PROMPTS = "prompts"
EVALUATION, UPDATE = "evaluation", "update_batch"
GRADIENT_ELEMENTS = 20_000_000
"""A gradient of no more than this (80 MB in fp32) is kept beside a checkpoint by default."""


class BatchMeta(TypedDict):
    """Which step a stored batch belongs to; beside a checkpoint, the sha256 of its weights."""

    step: int
    weights: NotRequired[str]


class Whole(Mapping[str, Tensor]):
    """Tensors by name, each put together from its shards when it is read."""

    def __init__(self, values: Params) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Tensor:
        value = self._values[name].detach()
        return cast(Any, value).full_tensor() if is_shard(value) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class RecordFiles:
    """`gradient`: keep the gradient itself beside checkpoints; None: where it is small enough."""

    def __init__(self, folder: Path, *, gradient: bool | None = None) -> None:
        self.folder, self.gradient = folder, gradient
        self._content: RecordContent | None = None
        self._beside: tuple[int, Path, str] | None = None
        """(step, checkpoint, its weights), what the step at hand is made from."""
        self._earlier: Path | None = None
        """The checkpoint that training was resumed from, until its batch is replaced."""
        self._pending: tuple[RecordedStep, str | None] | None = None
        """(the step at hand, sha256 of the gradient that is kept of it)."""

    def forget(self) -> None:
        """Nothing that is recorded from here on belongs to a checkpoint saved before."""
        self._beside = self._earlier = self._pending = None

    def describe(self, content: RecordContent, facts: FactsFile) -> None:
        """What does not change in training, once into the record's folder."""
        self._content = content
        self._write_record(self.folder, facts)
        write_facts(self.folder, facts)

    def add_batch(
        self, batch: UpdateBatch, step: int, facts: FactsFile, *, more: Mapping[str, object]
    ) -> None:
        """The batch of the step at hand; `more` goes into its manifest."""
        if not (self.folder / FACTS_FILE).is_file():
            write_facts(self.folder, facts)
        if self._earlier is not None:
            self._describe_again(self._earlier, step, facts)
        for place, meta in self._places(step):
            save_update_batch(place / UPDATE, batch, meta={**meta, **more})

    def add_gradient(
        self,
        gradient: Mapping[str, Tensor | None],
        params: Params,
        step: int,
        *,
        lr: float,
        ranks: Ranks,
    ) -> None:
        """Fingerprints of the gradient that the optimizer will see, and of the parameters."""
        sharded = any(map(is_shard, params.values()))
        if ranks.rank and not sharded:
            return
        present = Whole({name: g for name, g in gradient.items() if g is not None})
        fingerprint = Fingerprint.of(present)
        if not (math.isfinite(fingerprint.norm) and bool(fingerprint.sketch.isfinite().all())):
            self._pending = None  # what it does to the weights is not kept
            return  # it has no fingerprint; training decides what becomes of the step
        recorded = RecordedStep(
            folder=self.folder,
            step=step,
            lr=lr,
            gradient=fingerprint,
            without_gradient=tuple(name for name, g in gradient.items() if g is None),
            change=None,  # known after the step
            # Not the parameters after the step before: anything may have changed them since.
            before=sketch(Whole(params)),
        )
        beside = self._beside is not None and self._beside[0] == step
        if sharded:  # rank 0 alone knows of checkpoints, and all must put the shards together
            beside = ranks.broadcast_from_zero(lambda: beside)
        content = gradient_bytes(present) if beside and self._keeps(fingerprint) else None
        digest = None if content is None else hashlib.sha256(content).hexdigest()
        self._pending = (recorded, digest)
        if ranks.rank:
            return
        for place, meta in self._places(step):
            _write_step(
                place, replace(recorded, gradient_sha256=digest if "weights" in meta else None)
            )
            if "weights" not in meta:
                continue
            if content is not None:
                write_whole(place / MADE_STEP / GRADIENT_FILE, content)
            else:  # one that an earlier training left is of another batch
                (place / MADE_STEP / GRADIENT_FILE).unlink(missing_ok=True)

    def after_step(self, step: int, params: Params, ranks: Ranks) -> None:
        """The optimizer has stepped: what became of the parameters."""
        if self._pending is None or self._pending[0].step != step:
            return
        after = sketch(Whole(params))
        recorded, digest = self._pending
        self._pending = None
        if ranks.rank or not bool(after.isfinite().all()):
            return  # weights that overflowed have no fingerprint; measuring them says so
        assert recorded.before is not None  # set by `add_gradient`
        stepped = replace(recorded, change=after - recorded.before)
        for place, meta in self._places(step):
            _write_step(
                place, replace(stepped, gradient_sha256=digest if "weights" in meta else None)
            )

    def add_evaluation(self, rollouts: Rollouts, step: int) -> None:
        """The rollouts that the step at hand was probed with."""
        for place, meta in self._places(step):
            save_rollouts(place / EVALUATION, rollouts, meta=meta)

    def add_checkpoint(self, checkpoint: Path, step: int, facts: FactsFile) -> None:
        """This checkpoint has just been written: the batch of `step`, the next, belongs to it."""
        layout = find_checkpoint(checkpoint)
        # The record before the facts, which it has too: killed in between, nothing is lost.
        self._write_record(layout.root, facts, step=step, files=_hashes(layout.root))
        write_facts(layout.root, facts)
        self._beside = (step, layout.root, sha256(layout.files[0]))

    def resume(self, checkpoint: Path, step: int, facts: FactsFile) -> None:
        """Training goes on from this checkpoint: so does the step at hand."""
        layout = find_checkpoint(checkpoint)
        if not (layout.root / RECORD_FILE).is_file():
            # killed between the trainer's last file and our first
            self._write_record(layout.root, facts, step=step, files=_hashes(layout.root))
            write_facts(layout.root, facts)
        self._earlier = layout.root
        self._beside = (step, layout.root, sha256(layout.files[0]))

    def _describe_again(self, checkpoint: Path, step: int, facts: FactsFile) -> None:
        """Facts and record of the training at hand, whose batch is about to replace the earlier
        one's: its options may be others. The files are as they were saved."""
        earlier = read_record((checkpoint,))
        files = None if earlier is None else earlier.files
        self._write_record(checkpoint, facts, step=step, files=files)
        write_facts(checkpoint, facts)
        self._earlier = None

    def _places(self, step: int) -> list[tuple[Path, BatchMeta]]:
        places: list[tuple[Path, BatchMeta]] = [(self.folder / f"step_{step}", {"step": step})]
        if self._beside is not None and self._beside[0] == step:
            _, checkpoint, weights = self._beside
            places.append((checkpoint, {"step": step, "weights": weights}))
        return places

    def _write_record(
        self,
        folder: Path,
        facts: FactsFile,
        *,
        step: int | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        if self._content is None:  # `describe` failed, and the probe is off
            return
        prompts = self._content["prompts"].copy()
        # Without prompts, too: it tells where the batches of all steps are.
        prompts["folder"] = os.path.relpath(self.folder / PROMPTS, folder)
        content = {**self._content, "prompts": prompts, "facts": facts}
        content |= {"files": files} if files else {}
        content |= {} if step is None else {"step": step}
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1, sort_keys=True) + "\n"
        write_whole(folder / RECORD_FILE, text.encode())

    def _keeps(self, gradient: Fingerprint) -> bool:
        if self.gradient is not None:
            return self.gradient
        return gradient.elements <= GRADIENT_ELEMENTS


def name_parameters(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Names beside torch's file of an optimizer, which has numbers for them.

    Their order is known here, whatever groups the optimizer has. Parameters of something else than
    the model have no name that a checkpoint knows: then nothing is written.
    """
    if not any((checkpoint / name).is_file() for name in OPTIMIZER_FILES):
        return
    name_of = {id(p): name for name, p in model.named_parameters()}
    groups = [[name_of.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
    if all(name is not None for group in groups for name in group):
        write_json(checkpoint / PARAM_NAMES, groups)


def write_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(facts, indent=1, sort_keys=True) + "\n"
    write_whole(folder / FACTS_FILE, text.encode())


def _write_step(place: Path, step: RecordedStep) -> None:
    folder = place / MADE_STEP
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FINGERPRINT_FILE, step.as_json())


def _hashes(checkpoint: Path) -> dict[str, str]:
    """sha256 of each file that the trainer wrote."""
    own = (FACTS_FILE, RECORD_FILE, UPDATE, EVALUATION, MADE_STEP)
    return {
        str(file.relative_to(checkpoint)): sha256(file)
        for file in sorted(checkpoint.rglob("*"))
        if file.is_file() and file.relative_to(checkpoint).parts[0] not in own
    }
