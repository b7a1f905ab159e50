"""LoRA with non-reentrant gradient checkpointing: a plain loop over padded causal LM batches."""

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, ROWS, PAD, VOCABULARY, PROMPT, ANSWER = 4, 4, 0, 32, 5, 7


def load_base():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
        pad_token_id=PAD, bos_token_id=None, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def build():
    base = load_base()
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lora = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(base, lora)
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.0)
    return model, optimizer


def make_batch(generator):
    """Left-padded prompts, right-padded answers."""
    width = PROMPT + ANSWER
    tokens = torch.randint(2, VOCABULARY, (ROWS, width), generator=generator)
    start = torch.randint(0, 3, (ROWS, 1), generator=generator)
    stop = width - torch.randint(0, 4, (ROWS, 1), generator=generator)
    position = torch.arange(width)
    attention = (position >= start) & (position < stop)
    answer = attention & (position >= PROMPT)
    tokens = torch.where(attention, tokens, torch.tensor(PAD))
    return {"tokens": tokens, "attention": attention.long(), "answer": answer}


def answer_log_probs(model, batch):
    positions = (batch["attention"].cumsum(-1) - 1).clamp(min=0)
    outputs = model(
        input_ids=batch["tokens"], attention_mask=batch["attention"], position_ids=positions
    )
    logits = outputs.logits[:, PROMPT - 1 : -1].float()
    law = F.log_softmax(logits, dim=-1)
    chosen = batch["tokens"][:, PROMPT:]
    log_prob = law.gather(-1, chosen[..., None]).squeeze(-1)
    entropy = -(law.exp() * law).sum(-1)
    return log_prob, entropy


def loss_of(model, batch):
    log_prob, entropy = answer_log_probs(model, batch)
    mask = batch["answer"][:, PROMPT:]
    count = mask.sum().clamp(min=1)
    likelihood = torch.where(mask, log_prob, torch.zeros(())).sum() / count
    bonus = torch.where(mask, entropy, torch.zeros(())).sum() / count
    return -likelihood - 0.01 * bonus


def main():
    model, optimizer = build()
    generator = torch.Generator().manual_seed(1)
    trainable = [p for p in model.parameters() if p.requires_grad]
    for step in range(STEPS):
        batch = make_batch(generator)
        loss = loss_of(model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.3f} norm {norm.item():.3f}")


if __name__ == "__main__":
    main()
