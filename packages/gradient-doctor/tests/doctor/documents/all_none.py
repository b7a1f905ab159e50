"""Document 001, issue 2: 392 of 392 gradients are None under reentrant checkpointing."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 28
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def build():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16, hidden_size=4, intermediate_size=4, num_hidden_layers=LAYERS,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=16, use_cache=False,
        pad_token_id=0, bos_token_id=None, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    base = LlamaForCausalLM(config)
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model = get_peft_model(base, LoraConfig(r=1, target_modules=MODULES, task_type="CAUSAL_LM"))
    model.enable_input_require_grads()
    model.train()
    return model


def entropy_of(model, tokens):
    law = torch.log_softmax(model(input_ids=tokens).logits, dim=-1)
    return -(law.exp() * law).sum(-1).mean()


def main():
    model = build()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    for _ in range(2):
        tokens = torch.randint(2, 16, (2, 6))
        entropy = entropy_of(model, tokens)
        grads = torch.autograd.grad(entropy, trainable, allow_unused=True)  # FAULT
        missing = sum(grad is None for grad in grads)
        print(f"{missing}/{len(grads)} gradients are None")
        for weight, grad in zip(trainable, grads):
            weight.grad = grad
        optimizer.step()


if __name__ == "__main__":
    main()
