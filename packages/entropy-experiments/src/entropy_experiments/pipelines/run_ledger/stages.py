"""The stages of a run's ledger: rank 0 alone reads and writes, every rank has the contents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from entropy_experiments.distributed import current
from entropy_experiments.pipelines.influence.store import Stage, StageStore

Say = Callable[[str], None]
"""Called with a line of progress."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LedgerStages:
    """What finished visits and replays left on disk, under the key of one ledger."""

    store: StageStore
    key: str

    def holds(self, name: str) -> bool:
        return current().broadcast_from_zero(lambda: self.store.holds(name, self.key))

    def get(self, name: str) -> Stage:
        """A stage that must be there.

        Raises:
            FileNotFoundError: If it is not.
        """
        stage = current().broadcast_from_zero(lambda: self.store.get(name, self.key))
        if stage is None:
            raise FileNotFoundError(
                f"{self.store.folder} has no stage {name}, which this run needs. Delete the "
                "folder and run the same command again."
            )
        return stage

    def put(self, name: str, stage: Stage) -> None:
        current().broadcast_from_zero(lambda: self.store.put(name, self.key, stage, 0.0))

    def remove(self, *names: str) -> None:
        """Stages that nobody needs any more; those that are not there are left so."""

        def remove() -> None:
            for name in names:
                self.store.remove(name, self.key)

        current().broadcast_from_zero(remove)
