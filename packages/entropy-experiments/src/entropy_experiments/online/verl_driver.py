"""What verl's driver sees of a run, into a record: batches, and the checkpoints they belong to.

Step N, counted from 0, is made from `global_step_N`; verl counts its steps from 1. The first one is
made from the checkpoint that training was resumed from, which is verl's own choice
(`RayPPOTrainer._load_checkpoint`): of its configuration, or the latest that its file names.
Everything passes one guard: what fails is logged once, and training goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Latest:
    """What verl's file says, and when it was written: a name alone may be an earlier training's."""

    step: int
    written: int

    @staticmethod
    def read(config: Any) -> Latest | None:
        """None: nothing was saved yet."""
        file = Path(config["trainer"]["default_local_dir"]) / LATEST
        if not file.is_file():
            return None
        return Latest(step=int(file.read_text()), written=file.stat().st_mtime_ns)


class DriverRecorder:
    """Records verl's batches where there is no model.

    Make it before training begins, since a first step may replace what verl's file says; the rest
    of the configuration is read with the first batch, when it is complete.

    Args:
        config: The whole configuration, with data.entropy_record.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._facts: FactsFile = {}
        self._files: RecordFiles | None = None
        self._next = 0
        self._guard = Guard()
        self._latest = self._guard.run(
            lambda: Latest.read(config), doing="finding verl's latest checkpoint"
        )

    @property
    def off(self) -> Exception | None:
        """Why recording ended, if it did."""
        return self._guard.error

    def add(self, batch: Any) -> None:
        """The batch of the step that was just made; its checkpoint, if any, is written."""
        if self._files is None:
            self._guard.run(self._begin, doing="recording verl's settings")
        self._guard.run(lambda: self._add(batch), doing=f"recording step {self._next}")

    def _begin(self) -> None:
        folder = self._config["data"].get("entropy_record")
        if folder is None:
            raise ValueError(
                "data.entropy_record is not set; expected the folder of the record: "
                "+data.entropy_record=run/record."
            )
        self._refuse_several_steps()
        settings = verl_settings(self._config)
        self._facts = check_facts(settings.facts)  # type: ignore[assignment]
        self._files = RecordFiles(Path(folder))
        self._files.describe(_content(settings.unfollowed), self._facts)
        begun = resumed_from(self._config, self._latest)
        if begun is not None:
            self._next = _number(begun)
            self._files.resume(begun, self._next, self._facts)

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
        step, self._next = self._next, self._next + 1
        if self._next < (self._config["trainer"].get("critic_warmup") or 0):
            self._latest = Latest.read(self._config)  # saved in the warm-up: no batch of ours
            return  # the critic alone has learned from it
        stated = getattr(batch, "meta_info", {}).get("global_steps", self._next)
        if int(stated) != self._next:
            raise ValueError(
                f"verl's batch is of its step {stated}; expected step {self._next}, the one after "
                "those that were handed over. Training was resumed in a way that is not followed "
                "here: record in the workers (entropy_experiments.online.verl.record_engine)."
            )
        self._files.add_batch(verl_batch(batch), step, self._facts, more={})
        latest = Latest.read(self._config)
        if latest is None or latest == self._latest:
            return
        self._latest = latest
        if latest.step != self._next:
            raise ValueError(
                f"verl has saved its step {latest.step}, and {self._next} batches were handed "
                "over; expected a batch of every step. Record in the workers "
                "(entropy_experiments.online.verl.record_engine)."
            )
        saved = Path(self._config["trainer"]["default_local_dir"]) / _folder(latest.step)
        self._files.add_checkpoint(saved, self._next, self._facts)


def resumed_from(config: Any, latest: Latest | None) -> Path | None:
    """The checkpoint that verl resumes from by this configuration; None: it begins anew."""
    trainer = config["trainer"]
    mode = trainer.get("resume_mode") or "auto"
    if mode == "disable":
        return None
    if mode == "resume_path":
        return Path(trainer["resume_from_path"])
    folder = None if latest is None else Path(trainer["default_local_dir"]) / _folder(latest.step)
    return folder if folder is not None and folder.is_dir() else None


def _content(unfollowed: Sequence[str]) -> RecordContent:
    return {
        "schema": SCHEMA,
        "trainer": {"class": "RayPPOTrainer", "module": "verl", "verl": _verl()},
        "options": {},
        "unfollowed": list(unfollowed),
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


def _folder(step: int) -> str:
    return f"global_step_{step}"


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("global_step_"))


def _verl() -> str:
    try:
        return version("verl")
    except PackageNotFoundError:  # a checkout on the path
        return "unknown"
