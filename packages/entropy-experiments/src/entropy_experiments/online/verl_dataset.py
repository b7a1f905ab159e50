"""A dataset class for verl's configuration that records the batch of every step, on the driver.

    data.custom_cls.path=pkg://entropy_experiments.online.verl_dataset
    data.custom_cls.name=RecordingDataset
    +data.entropy_record=run/record
    trainer.use_v1=false

verl's RayPPOTrainer hands every finished batch to its dataset's `on_batch_end` (verl 0.9: the
trainer of `use_v1=false`; the other one keeps its batches in a queue of their own, and is recorded
in its workers: `verl.record_engine`). The rows, their order and the random numbers are those of
verl's own RLHFDataset.

The driver has neither weights nor gradients: the record holds tokens, masks, advantages and
log-probs of each step, and the settings of its loss; no fingerprint of the step. Whether a rebuilt
step is training's is then told by the checkpoint after it. It needs one optimizer step per batch:
`ppo_mini_batch_size` equal to `train_batch_size`, and `ppo_epochs` 1. The last batch of a run is
not handed over.
"""

from __future__ import annotations

from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset  # pyright: ignore[reportMissingImports]

from entropy_experiments.online.verl_driver import DriverRecorder


class RecordingDataset(RLHFDataset):
    """verl's own dataset, and a record of what training makes of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder: DriverRecorder | None = DriverRecorder(self.config._get_root())

    def on_batch_end(self, batch: Any) -> None:
        """Called by the trainer after each step."""
        if self._recorder is not None:  # of the driver's own dataset, not of a copy
            self._recorder.add(batch)

    def __getstate__(self) -> dict[str, Any]:
        # Data loaders' workers and checkpoints copy a dataset; the record is the driver's alone.
        return {**super().__getstate__(), "_recorder": None}
