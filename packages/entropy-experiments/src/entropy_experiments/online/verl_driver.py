"""What verl's driver sees of a run, into a record: batches, and the checkpoints they belong to.

Step N, counted from 0, is made from `global_step_N`; verl counts its steps from 1. Everything
passes one guard: what fails is logged once, and training goes on.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from entropy_experiments.checkpoints.training_facts import FactsFile, check_facts
from entropy_experiments.checkpoints.training_record import SCHEMA, RecordContent
from entropy_experiments.online.record_files import RecordFiles
from entropy_experiments.online.verl import verl_batch, verl_settings
from entropy_experiments.online.watch import Guard

LATEST = "latest_checkpointed_iteration.txt"
"""verl's file of the last step that was saved, in the folder of the checkpoints."""


class DriverRecorder:
    """Records verl's batches where there is no model; `config` is the whole configuration."""

    def __init__(self, folder: Path | None, config: Any) -> None:
        self._config = config
        self._facts: FactsFile = {}
        self._files: RecordFiles | None = None
        self._next = 0
        self._guard = Guard()
        self._guard.run(lambda: self._begin(folder), doing="recording verl's settings")

    @property
    def off(self) -> Exception | None:
        """Why recording ended, if it did."""
        return self._guard.error

    def add(self, batch: Any) -> None:
        """The batch of the step that was just made; its checkpoint, if any, is written."""
        self._guard.run(lambda: self._add(batch), doing=f"recording step {self._next}")

    def _begin(self, folder: Path | None) -> None:
        if folder is None:
            raise ValueError(
                "data.entropy_record is not set; expected the folder of the record: "
                "+data.entropy_record=run/record."
            )
        self._refuse_several_steps()
        settings = verl_settings(self._config)
        self._facts = check_facts(settings.facts)  # type: ignore[assignment]
        self._files = RecordFiles(folder)
        content: RecordContent = {
            "schema": SCHEMA,
            "trainer": {"class": "RayPPOTrainer", "module": "verl", "verl": _verl()},
            "options": {},
            "unfollowed": list(settings.unfollowed),
            "sampling": [],
            "rewards": {
                "functions": [{"name": "reward", "why_not": "verl's reward is not recorded"}],
                "weights": [1.0],
            },
            "prompts": {
                "sets": {},
                "dropped": [],
                "messages": False,
                "why_not": "verl's driver records batches, not its dataset",
            },
            "base": None,
            "base_location": None,
        }
        self._files.describe(content, self._facts)

    def _refuse_several_steps(self) -> None:
        actor = self._config["actor_rollout_ref"]["actor"]
        mini, whole = actor["ppo_mini_batch_size"], self._config["data"]["train_batch_size"]
        epochs = actor.get("ppo_epochs") or 1
        if mini != whole or epochs != 1:
            raise ValueError(
                f"verl makes {-(-whole // mini) * epochs} optimizer steps of a batch "
                f"(train_batch_size {whole}, ppo_mini_batch_size {mini}, ppo_epochs {epochs}), and "
                "the driver does not see which rollouts each learns from. Expected one step: set "
                f"ppo_mini_batch_size={whole} and ppo_epochs=1, or record in the workers: "
                "entropy_experiments.online.verl.record_engine."
            )

    def _add(self, batch: Any) -> None:
        assert self._files is not None  # its failure has turned the guard off
        step = self._step_of(batch)
        self._files.add_batch(verl_batch(batch), step, self._facts, more={})
        self._next = step + 1
        saved = Path(self._config["trainer"]["default_local_dir"]) / f"global_step_{self._next}"
        if saved.is_dir():
            self._files.add_checkpoint(saved, self._next, self._facts)

    def _step_of(self, batch: Any) -> int:
        """From 0. The batch may say it; else it is counted from the checkpoint begun with."""
        told = getattr(batch, "meta_info", {}).get("global_steps")
        return self._next if told is None else int(told) - 1


def _verl() -> str:
    try:
        return version("verl")
    except PackageNotFoundError:  # a checkout on the path
        return "unknown"
