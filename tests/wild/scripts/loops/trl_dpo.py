"""TRL: preferences of a tiny model under LoRA, the base as its reference."""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer
from weights import save_digest

from oracles.tiny_models import LORA, tiny_model, tiny_tokenizer

pairs = [
    {"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{a - b}"}
    for a in range(8)
    for b in range(1, 8)
]
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    trainer = DPOTrainer(
        model=tiny_model(),
        args=DPOConfig(
            output_dir=folder,
            max_steps=5,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=Dataset.from_list(pairs),
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(**LORA),
    )
    trainer.train()
save_digest(trainer.model, updates=trainer.state.global_step)
