"""lightning: its own demonstration module, under its own Trainer."""

import lightning
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from weights import save_digest

lightning.seed_everything(0)
model = BoringModel()
trainer = lightning.Trainer(
    max_epochs=1,
    limit_train_batches=20,
    limit_val_batches=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, datamodule=BoringDataModule())
save_digest(model, updates=trainer.global_step)
