"""Rollouts that are not drawn here: saved by this package, dumped by a trainer, or typed in.

What they were drawn from must be the policy that is probed, or be known: rollouts of other weights
are refused unless they carry the log-probs of the policy that drew them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from entropy_experiments.artifacts import MANIFEST
from entropy_experiments.checkpoints.runs import number_of
from entropy_experiments.pipelines.influence.requests import File, Sequences
from entropy_experiments.pipelines.probe_inputs import refuse_foreign
from entropy_experiments.pipelines.probe_sampling import OpenCheckpoint
from entropy_experiments.sampling import text_dumps
from entropy_experiments.sampling.importers import Imported, read_dump
from entropy_experiments.sampling.rollout_files import TENSORS, load_rollouts, load_update_batch
from entropy_experiments.types import Rollouts, UpdateBatch

FOREIGN_REWARDS = (
    "the update batch's rewards contradict its advantages (a better rollout of a group has the "
    "smaller advantage): they were recorded in another order, and nothing is said by them"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Made:
    """An update batch, and how it came about."""

    batch: UpdateBatch
    real: bool = False
    bound: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutReader:
    """Reads rollouts for one opened checkpoint."""

    probed: OpenCheckpoint
    model: str
    """Hash of the weights that are probed."""

    @property
    def tokenizer(self) -> Any:
        return self.probed.checkpoint.tokenizer

    @property
    def _vocabulary(self) -> int:
        return self.probed.checkpoint.model.get_input_embeddings().weight.shape[0]

    def update(self, params: Sequences | File, where: str) -> Made:
        """The update batch that a workspace of kind custom_sequence or from_file names."""
        if isinstance(params, Sequences):
            return self._imported(self._sequences(params, where), f"{where}.sequences")
        return self._update_file(params)

    def folder(self, path: Path, where: str) -> Made:
        """An update batch that was recorded in training, drawn, or saved by an earlier study."""
        batch, meta = load_update_batch(path)
        at = meta.get("model") or (meta.get("identity") or {}).get("model")
        if at is not None and at != self.model:
            raise ValueError(
                f"{where}: {path} was saved for other weights ({at[:12]}... there, "
                f"{self.model[:12]}... here). Load the checkpoint it was made with, or leave "
                f"{where} out."
            )
        refuse_foreign(batch, meta, self.probed.checkpoint, f"{path} ({where})")
        # Recorded: of the step that training made from these weights. Saved: as it was then.
        recorded = meta.get("weights") is not None
        return Made(
            batch=batch,
            real=recorded or bool(meta.get("real", False)),
            bound=recorded or bool(meta.get("bound", False)),
            notes=(f"update rollouts reused from {path}",),
        )

    def _update_file(self, params: File) -> Made:
        path = Path(params.path)
        if is_own_folder(path):
            return self.folder(path, "influence.update_batch.params.path")
        return self._imported(self._dump(params), str(path), real=True)

    def _imported(self, imported: Imported, where: str, *, real: bool = False) -> Made:
        if imported.batch is None:
            lacking = f" Not in {imported.format}: {'; '.join(imported.missing)}."
            raise ValueError(
                f"{where} has neither rewards nor advantages; an update batch needs one of them "
                "for each rollout. Add a 'reward' or an 'advantage'."
                + (lacking if imported.missing else "")
            )
        self._refuse_tokens(imported.rollouts, where)
        if real:
            _refuse_other_checkpoint(imported.made_from, self.probed.checkpoint.path, where)
        return Made(
            batch=imported.batch, real=real, notes=(f"update batch from {where}", *imported.notes)
        )

    def rollouts(
        self, params: Sequences | File, where: str
    ) -> tuple[Rollouts, Tensor | None, tuple[str, ...]]:
        """Rollouts that are not drawn here: (rollouts, rewards, notes)."""
        if isinstance(params, File) and is_own_folder(Path(params.path)):
            path = Path(params.path)
            rollouts, meta = load_rollouts(path)
            reward_N, notes = None, (f"rollouts from {path}",)
            if _holds_update(path):
                batch, _ = load_update_batch(path)
                fits = rewards_fit(batch)
                notes = notes if fits else (*notes, FOREIGN_REWARDS)
                if fits and batch.reward_N is not None:
                    reward_N = batch.reward_N.double()
            at = (meta.get("identity") or {}).get("model")
            here = self.model
            if at == here:  # drawn from this very policy: no weights are needed
                rollouts = replace(rollouts, behaviour_logprob_NS=None)
            elif at is not None and rollouts.behaviour_logprob_NS is None:
                raise ValueError(
                    f"{where}.path: {path} was drawn from other weights ({at[:12]}... there, "
                    f"{here[:12]}... here) and has no log-probs of the policy that drew it. Draw "
                    "new rollouts, or save them with behaviour_logprob_NS."
                )
        else:
            file = isinstance(params, File)
            imported = self._dump(params) if file else self._sequences(params, where)
            rollouts, notes = imported.rollouts, imported.notes
            reward_N = None if imported.batch is None else imported.batch.reward_N
        if rollouts.behaviour_logprob_NS is None:
            notes = (*notes, "taken as drawn from the policy that is probed")
        self._refuse_tokens(rollouts, where)
        return rollouts, reward_N, notes

    def _dump(self, params: File) -> Imported:
        return read_dump(
            params.path,
            self.tokenizer,
            step=params.step,
            ranks=params.ranks,
            max_completion_length=params.max_completion_length,
            append_eos=params.append_eos,
            scale=self.probed.facts["advantage"],
            vocabulary=self._vocabulary,
        )

    def _sequences(self, params: Sequences, where: str) -> Imported:
        named = [(f"{where}.sequences[{i}]", row) for i, row in enumerate(params.sequences)]
        return text_dumps.import_records(
            named,
            self.tokenizer,
            None,
            params.append_eos,
            self.probed.facts["advantage"],
            [],
            Path(where),
        )

    def _refuse_tokens(self, rollouts: Rollouts, where: str) -> None:
        rows = self._vocabulary
        highest = int(rollouts.tokens_NS[rollouts.attention_NS].max())
        if highest >= rows:
            raise ValueError(
                f"{where} has token id {highest}; the model has {rows} tokens. It was made with "
                "another model."
            )


def _refuse_other_checkpoint(made_from: int | None, checkpoint: Path, where: str) -> None:
    """A framework's step N leads from its checkpoint N - 1 to its checkpoint N."""
    number = number_of(checkpoint)
    if made_from is None or number in (None, made_from):
        return
    raise ValueError(
        f"{where} is the dump of step {made_from + 1}, which led from checkpoint {made_from} to "
        f"checkpoint {made_from + 1}; {checkpoint} is checkpoint {number}, and the step made from "
        f"it is dump {number + 1}. Give that one, or checkpoint {made_from}."
    )


def rewards_fit(batch: UpdateBatch) -> bool:
    """Whether rewards and advantages of every group are in the same order."""
    if batch.reward_N is None:
        return True
    first_N1 = batch.counted_NS.int().argmax(1, keepdim=True)
    advantage_N = batch.advantage_NS.gather(1, first_N1).squeeze(1).double()
    for prompt in batch.rollouts.prompt_N.unique():
        rows = batch.rollouts.prompt_N == prompt
        reward_N, order = batch.reward_N[rows].double(), batch.reward_N[rows].argsort(stable=True)
        rises_N = reward_N[order].diff() > 0
        falls_N = advantage_N[rows][order].diff() < 0
        if bool((rises_N & falls_N).any()):
            return False
    return True


def is_own_folder(path: Path) -> bool:
    """A folder that this program wrote, whole or not; an empty one is said to be so."""
    if not path.is_dir():
        return False
    own = any((path / name).exists() for name in (MANIFEST, TENSORS))
    return own or not any(path.iterdir())


def _holds_update(folder: Path) -> bool:
    return json.loads((folder / MANIFEST).read_bytes())["kind"] == "update_batch"
