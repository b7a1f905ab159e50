"""TRL's GRPOTrainer on a tiny model, with a reward function and its own clipped loss."""

import tempfile

import datasets
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

STEPS, GROUP, LENGTH = 4, 4, 8
CHARACTERS = "0123456789+-*= "


def make_tokenizer():
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    words |= {character: 3 + i for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        padding_side="left",
    )  # fmt: skip


def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=3 + len(CHARACTERS), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=None, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def digits(completions, **_):
    return [sum(c.isdigit() for c in text) / LENGTH + 0.01 * len(text) for text in completions]


class ClippedTrainer(GRPOTrainer):
    def answer_log_probs(self, model, inputs):
        tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].size(1)
        logits = model(input_ids=tokens, attention_mask=attention).logits
        logits = logits[:, -width - 1 : -1].float()
        law = torch.log_softmax(logits, dim=-1)
        log_prob = law.gather(-1, inputs["completion_ids"][..., None]).squeeze(-1)
        entropy = -(law.exp() * law).sum(-1)
        return log_prob, entropy

    def _compute_loss(self, model, inputs):
        log_prob, entropy = self.answer_log_probs(model, inputs)
        mask = inputs["completion_mask"].bool()
        old = inputs.get("old_per_token_logps")
        old = log_prob.detach() if old is None else old
        ratio = torch.exp(log_prob - old)
        advantage = inputs["advantages"][:, None]
        surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        objective = surrogate + 0.01 * entropy
        count = mask.sum().clamp(min=1)
        loss = -torch.where(mask, objective, torch.zeros(())).sum() / count
        self._metrics["train"]["ratio"].append(ratio.detach().mean().item())
        return loss


def main():
    tokenizer, model = make_tokenizer(), make_model()
    prompts = ["1+1=", "12+34=", "7-3=", "9*2+1="]
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=2 * GROUP, beta=0.0,
            num_generations=GROUP, max_completion_length=LENGTH, learning_rate=3e-3,
            logging_steps=1, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False,
            save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = ClippedTrainer(
            model=model, reward_funcs=digits, args=arguments, processing_class=tokenizer,
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        )  # fmt: skip
        trainer.train()


if __name__ == "__main__":
    main()
