"""TRL: supervised fine-tuning of a tiny model, gradients accumulated."""

import tempfile

from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from weights import save_digest

from oracles.tiny_models import tiny_model, tiny_tokenizer

SETTINGS = {
    "max_steps": 5,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
}
texts = [{"text": f"{a}+{b}={a + b}"} for a in range(8) for b in range(8)]
with tempfile.TemporaryDirectory() as folder:
    trainer = SFTTrainer(
        model=tiny_model(),
        args=SFTConfig(output_dir=folder, max_length=32, **SETTINGS),
        train_dataset=Dataset.from_list(texts),
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
save_digest(trainer.model, updates=trainer.state.global_step)
