"""Every step's batch on disk, so that any of them can be asked about later.

    DIR/step_N/update_batch     what step N (counted from 0) learned from: tokens, masks,
                                advantages, old log-probs
    DIR/step_N/evaluation       what it was probed with, if it was
    DIR/entropy_probe.json      the training facts
    checkpoint-N/...            the same three, beside each checkpoint that the trainer saves, and
                                beside the one that it was resumed from

The copies beside a checkpoint name the weights they belong to, and are what the offline commands
read: `entropy-probe run --checkpoint checkpoint-N` replays the step that was made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from entropy_experiments.numerics.ranks import Ranks
from entropy_experiments.online.facts_file import refuse_unknown, write_facts
from entropy_experiments.online.trl_batch import update_batch
from entropy_experiments.policy.base import sha256
from entropy_experiments.policy.facts import FACTS_FILE
from entropy_experiments.policy.layout import find_checkpoint
from entropy_experiments.rollouts.store import save_rollouts, save_update_batch
from entropy_experiments.types import Rollouts

EVALUATION, UPDATE = "evaluation", "update_batch"


class Recorder:
    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        refuse_unknown(facts)
        self.folder, self.facts = folder, facts
        self._beside: tuple[int, Path, str] | None = None
        """(step, checkpoint, its weights), what the step at hand is made from."""

    def record(self, trainer: Any, step: int, ranks: Ranks) -> None:
        """The batch of the step at hand."""
        batch = update_batch(trainer, ranks)
        if ranks.rank:
            return
        if not (self.folder / FACTS_FILE).is_file():
            write_facts(self.folder, trainer, self.facts)
        for place, meta in self._places(step):
            save_update_batch(place / UPDATE, batch, meta=meta)

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
        write_facts(checkpoint, trainer, self.facts)
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
        self._belongs_to(trainer.state.global_step, checkpoint)

    def _belongs_to(self, step: int, checkpoint: Path) -> None:
        weights = find_checkpoint(checkpoint).files[0]
        self._beside = (step, checkpoint, sha256(weights))

    def _places(self, step: int) -> list[tuple[Path, dict[str, Any]]]:
        places: list[tuple[Path, dict[str, Any]]] = [(self.folder / f"step_{step}", {"step": step})]
        if self._beside is not None and self._beside[0] == step:
            _, checkpoint, weights = self._beside
            places.append((checkpoint, {"step": step, "weights": weights}))
        return places
