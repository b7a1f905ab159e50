"""transformers.Trainer with its own loss: next-token loss weighted per answer, plus a z-loss."""

import tempfile

import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments

STEPS, PAD, VOCABULARY, LENGTH, IGNORE = 4, 0, 24, 12, -100


class Answers(torch.utils.data.Dataset):
    """Right-padded sequences; prompts and padding carry the label -100."""

    def __init__(self, size=16):
        generator = torch.Generator().manual_seed(1)
        self.rows = []
        for i in range(size):
            tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
            length, prompt = LENGTH - i % 5, 3 + i % 2
            position = torch.arange(LENGTH)
            attention = (position < length).long()
            tokens = torch.where(attention.bool(), tokens, torch.tensor(PAD))
            answer = attention.bool() & (position >= prompt)
            labels = torch.where(answer, tokens, torch.tensor(IGNORE))
            weight = torch.tensor(0.5 + (i % 3) / 2)
            row = {"input_ids": tokens, "attention_mask": attention}
            self.rows.append({**row, "labels": labels, "weight": weight})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def weighted_loss(model, inputs):
    outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    logits = outputs.logits[:, :-1].float()
    labels = inputs["labels"][:, 1:]
    kept = labels != IGNORE
    token_loss = F.cross_entropy(
        logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none"
    )
    row_loss = token_loss.sum(1) / kept.sum(1)
    weight = inputs["weight"]
    answer_loss = (weight * row_loss).sum() / weight.sum()
    log_z = torch.logsumexp(logits, dim=-1)
    z_loss = log_z[kept].square().mean()
    loss = answer_loss + 1e-3 * z_loss
    return loss, outputs


class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = weighted_loss(model, inputs)
        return (loss, outputs) if return_outputs else loss


def build():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        pad_token_id=PAD, bos_token_id=None, eos_token_id=1, tie_word_embeddings=False,
        attention_dropout=0.1, initializer_range=0.2,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.train()
    return model


def main():
    model = build()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=4, learning_rate=3e-3,
            max_grad_norm=1.0, weight_decay=0.01, lr_scheduler_type="linear", logging_steps=1,
            report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
            remove_unused_columns=False, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = WeightedTrainer(model=model, args=arguments, train_dataset=Answers())
        trainer.train()


if __name__ == "__main__":
    main()
